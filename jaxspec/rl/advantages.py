"""Group-relative advantages and the weights of the policy loss, on the host in float64."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

KINDS = ("grpo", "dr_grpo")
AGGREGATIONS = ("token", "sequence", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of a batch of samples and how its groups came out.

    Attributes:
      values: advantage of each sample; exactly 0 for invalid samples and groups of no variance.
      weights: 1 for valid samples, 0 for invalid ones.
      keep: whether a sample is valid and its group's rewards vary.
      groups: groups with a valid sample.
      zero_variance: those whose valid rewards are all equal.
      invalid: samples without a reward.
    """

    values: Float64[np.ndarray, " sample"]
    weights: Float64[np.ndarray, " sample"]
    keep: Bool[np.ndarray, " sample"]
    groups: int
    zero_variance: int
    invalid: int


def group_advantages(
    rewards: Float[np.ndarray, " sample"],
    groups: Int[np.ndarray, " sample"],
    *,
    kind: str = "grpo",
    valid: Bool[np.ndarray, " sample"] | None = None,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Advantages:
    """Compares each reward with its group's.

    "grpo" is (r - mean) / (std + eps) (Shao et al. 2024, arXiv:2402.03300, section 4.1.2);
    "dr_grpo" is r - mean (Liu et al. 2025, arXiv:2503.20783). The variance is the mean of squared
    deviations: the difference of two large means would lose what sets close rewards apart.

    Args:
      rewards: reward of each sample; those of invalid samples are not read.
      groups: group number of each sample, in any order.
      kind: "grpo" or "dr_grpo".
      valid: which samples have a reward; all when None.
      ddof: the variance divides by (members - ddof).
      eps: added to the standard deviation.

    Raises:
      ValueError: for an unknown kind, or a valid reward that is not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"advantage kind {kind!r} is unknown; known: {KINDS}")
    valid = np.ones(len(rewards), bool) if valid is None else valid
    if not np.isfinite(rewards[valid]).all():
        raise ValueError("a valid reward is not finite; mark its sample invalid")
    values = np.zeros(len(rewards), np.float64)
    names, member = np.unique(groups[valid], return_inverse=True)
    reward = rewards[valid].astype(np.float64)
    count = np.bincount(member, minlength=len(names))
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, member, reward)
    np.maximum.at(high, member, reward)
    varies = high > low

    mean = np.bincount(member, reward, len(names)) / count
    deviation = np.where(varies[member], reward - mean[member], 0.0)
    if kind == "grpo":
        squares = np.bincount(member, deviation**2, len(names))
        spread = np.sqrt(squares / np.maximum(count - ddof, 1))
        deviation = np.where(varies[member], deviation / (spread[member] + eps), 0.0)
    values[valid] = deviation
    keep = np.zeros(len(rewards), bool)
    keep[valid] = varies[member]
    return Advantages(
        values=values,
        weights=valid.astype(np.float64),
        keep=keep,
        groups=len(names),
        zero_variance=int((~varies).sum()),
        invalid=int((~valid).sum()),
    )


def drop_zero_variance(
    rewards: Float[np.ndarray, " sample"],
    groups: Int[np.ndarray, " sample"],
    valid: Bool[np.ndarray, " sample"] | None = None,
) -> Bool[np.ndarray, " sample"]:
    """Returns which samples are valid and in a group whose valid rewards differ (DAPO's filter).

    No sample may be left (Yu et al. 2025, arXiv:2503.14476, section 3.2): then there is nothing
    to update with. Denominators must count the kept samples alone.
    """
    return group_advantages(rewards, groups, kind="dr_grpo", valid=valid).keep


def aggregation_weights(
    kind: str,
    lengths: Int[np.ndarray, " sample"],
    max_length: int,
    keep: Bool[np.ndarray, " sample"] | None = None,
) -> tuple[Float64[np.ndarray, " sample"], float]:
    """Returns the weight of each sample's tokens and what the weighted sum is divided by.

    | kind | token weight | denominator | |
    |---|---|---|---|
    | "token" | 1 | trained tokens | DAPO: every token counts the same |
    | "sequence" | 1 / length | sequences | GRPO: every reply counts the same |
    | "constant" | 1 | sequences x max_length | Dr. GRPO: no term depends on the length |

    The denominator is that of the whole batch: it is 0 when nothing is trained, and then there
    is no update to make.

    Args:
      kind: how the tokens' losses become one.
      lengths: trained tokens of each sample.
      max_length: length limit of a reply (for "constant").
      keep: samples that count; all when None. The rest gets weight 0 and isn't counted.

    Raises:
      ValueError: for an unknown kind, or a reply longer than `max_length` with "constant".
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation {kind!r} is unknown; known: {AGGREGATIONS}")
    if kind == "constant" and lengths.max(initial=0) > max_length:
        raise ValueError(
            f"a reply of {lengths.max()} tokens is longer than max_length={max_length}, the "
            "length limit of the rollout"
        )
    counts = lengths > 0 if keep is None else keep & (lengths > 0)
    weights = counts.astype(np.float64)
    if kind == "sequence":
        weights = weights / np.maximum(lengths, 1)
    denominator = {
        "token": float(lengths[counts].sum()),
        "sequence": float(counts.sum()),
        "constant": float(counts.sum() * max_length),
    }[kind]
    return weights, denominator
