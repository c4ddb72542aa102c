"""Policy losses over per-token arrays [batch, time]; every sum here is local to the caller's shard.

GRPO, Dr.GRPO and DAPO share one clipped surrogate and differ in how tokens are weighted, which the
host decides (`LossConfig.aggregation`); GSPO clips one ratio for a whole reply. The loss is
`numerator / denominator`, with the denominator of the whole batch on all devices.
"""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

AGGREGATIONS = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "gspo": "sequence"}
# Metrics that combine by maximum, over devices and microbatches, and not by sums.
MAXIMA = ("max_log_ratio",)
# exp of it is 4.9e8: far beyond any clip, and its products stay finite in float32.
LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which policy loss is minimised.

    Three log-probabilities take part: of the policy being trained, of the `old` policy that the
    clip holds it near, and of the `behaviour`, as the sampler computed it. With `on_policy` every
    batch is used for one update, and `old` is the policy itself: the ratio is exactly 1 and its
    gradient is the policy gradient's. Otherwise `old` is what the caller passes, or the behaviour
    where it passes nothing. Where `old` is not the behaviour, a truncated importance weight
    exp(old - behaviour) makes up for the difference between trainer and sampler. For "gspo" the
    ratio and the weight are geometric means over the reply.

    Attributes:
      kind: "grpo" (arXiv 2402.03300), "dr_grpo" (2503.20783), "dapo" (2503.14476) or "gspo"
        (2507.18071).
      clip_low: the ratio is clipped below 1 - clip_low.
      clip_high: the ratio is clipped above 1 + clip_high.
      dual_clip: for negative advantages the loss is capped at -dual_clip * advantage
        (arXiv 1912.09729, eq. 4); None for no cap.
      kl_coefficient: weight of the divergence from a reference policy.
      importance_cap: largest importance weight (arXiv 1802.01561's rho-bar, 2505.24034); None for
        no importance weight.
      on_policy: whether each batch is used for one update only.
    """

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    importance_cap: float | None = 2.0
    on_policy: bool = True

    def __post_init__(self):
        if self.kind not in AGGREGATIONS:
            raise ValueError(
                f"LossConfig.kind is {self.kind!r}; known kinds are {tuple(AGGREGATIONS)}"
            )
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"LossConfig.clip_low is {self.clip_low}; it must lie in (0, 1]")
        if not self.clip_high > 0:
            raise ValueError(f"LossConfig.clip_high is {self.clip_high}; it must be above 0")
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(
                f"LossConfig.dual_clip is {self.dual_clip}; it must be above "
                f"1 + clip_high = {1 + self.clip_high}, or None"
            )
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(
                f"LossConfig.kl_coefficient is {self.kl_coefficient}; it must be finite, at least 0"
            )
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise ValueError(
                f"LossConfig.importance_cap is {self.importance_cap}; it must be at least 1, so "
                "that weights of 1 pass, or None"
            )

    @property
    def aggregation(self) -> str:
        """How replies are weighted: by "sequence", by "token", or with a "constant" divisor."""
        return AGGREGATIONS[self.kind]


@flax.struct.dataclass
class Surrogate:
    """A clipped surrogate, token by token.

    Attributes:
      loss: [batch, time] what is minimised.
      ratio: [batch, time] probability ratio of policy to old policy.
      clipped_low: bool [batch, time], the lower clip decided: no gradient.
      clipped_high: as clipped_low, for the upper clip.
      clipped_dual: as clipped_low, for the cap on negative advantages.
    """

    loss: Array
    ratio: Array
    clipped_low: Array
    clipped_high: Array
    clipped_dual: Array


def clipped_surrogate(
    log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch time"],
    config: LossConfig,
) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate ends and an optional cap.

    Args:
      log_ratio: log of the probability ratio to the old policy.
      advantages: advantage of each token.
      config: where to clip.
    """
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    capped = jnp.zeros_like(ratio, dtype=bool)
    if config.dual_clip is not None:
        capped = (advantages < 0) & (ratio > config.dual_clip)
        loss = jnp.where(capped, -config.dual_clip * advantages, loss)
    return Surrogate(
        loss=loss,
        ratio=ratio,
        clipped_low=(advantages < 0) & (ratio < low),
        clipped_high=(advantages > 0) & (ratio > high),
        clipped_dual=capped,
    )


def sequence_mean(
    values: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    context_axis: str | None = None,
) -> Float[Array, "batch time"]:
    """Gives every token the mean over its reply's masked-in tokens (0 for a reply without any).

    Args:
      values: one number a token.
      mask: tokens that count.
      segment_ids: one id for each reply of a row, at most the row's tokens; 0 in padding.
      context_axis: mesh axis that splits the rows' tokens, inside shard_map.
    """
    rows = jnp.arange(values.shape[0])[:, None]
    shards = 1 if context_axis is None else jax.lax.axis_size(context_axis)
    shape = (values.shape[0], values.shape[1] * shards + 1)

    def total(x: Array) -> Array:
        sums = jnp.zeros(shape, values.dtype).at[rows, segment_ids].add(jnp.where(mask, x, 0))
        return sums if context_axis is None else jax.lax.psum(sums, context_axis)

    means = total(values) / jnp.maximum(total(jnp.ones_like(values)), 1)
    return jnp.where(mask, means[rows, segment_ids], 0)


def kl_k3(log_ratio: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """Unbiased, never negative estimate of KL(p || q) from samples of p (Schulman's k3).

    Source: joschu.net/blog/kl-approx.html. Log-ratios are clamped; beyond, there is no gradient.

    Args:
      log_ratio: log p - log q of the sampled tokens.
    """
    inverse = jnp.clip(-log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.expm1(inverse) - inverse


def truncated_importance(
    log_ratio: Float[Array, "batch time"], cap: float
) -> Float[Array, "batch time"]:
    """Importance weight min(exp(log_ratio), cap), a constant to the gradient."""
    weight = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return jax.lax.stop_gradient(jnp.minimum(weight, cap))


def policy_loss(
    config: LossConfig,
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    token_weights: Float[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    old_logprobs: Float[Array, "batch time"] | None = None,
    reference_logprobs: Float[Array, "batch time"] | None = None,
    *,
    entropy: Float[Array, "batch time"] | None = None,
    context_axis: str | None = None,
) -> tuple[Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """Sums the policy loss over the tokens at hand.

    All log-probabilities are of the same tokens under the same temperature. Masked tokens may hold
    anything, NaN too.

    Args:
      config: which loss.
      logprobs: under the policy being trained; the only argument that is differentiated.
      behaviour_logprobs: as the sampler computed them.
      advantages: advantage of each token.
      mask: trained tokens.
      token_weights: weight of each token in the sum, made for `config.aggregation`.
      segment_ids: one id for each reply of a row; 0 in padding.
      old_logprobs: under the policy before the batch's first update, by the trainer.
      reference_logprobs: under the reference policy.
      entropy: of the policy at each token, for the metric.
      context_axis: mesh axis that splits the rows' tokens, inside shard_map.

    Returns:
      The weighted sum, to be divided by the whole batch's denominator, and the metrics, each as
      (sum, count) over the tokens at hand. Those named in MAXIMA are (maximum, 1) instead, or
      (0, 0) without tokens.

    Raises:
      ValueError: for old_logprobs with on_policy, or kl_coefficient without reference_logprobs.
    """
    if config.on_policy and old_logprobs is not None:
        raise ValueError(
            "LossConfig.on_policy=True takes the policy itself as the old one; set it to False to "
            "use old_logprobs"
        )
    if config.kl_coefficient and reference_logprobs is None:
        raise ValueError(
            f"LossConfig.kl_coefficient is {config.kl_coefficient} and there are no "
            "reference_logprobs; pass them or set it to 0"
        )

    def clean(x: Array) -> Array:
        return jnp.where(mask, x, 0)

    def constant(x: Array) -> Array:
        return jax.lax.stop_gradient(clean(x))

    logprobs, behaviour = clean(logprobs), constant(behaviour_logprobs)
    advantages, weights = constant(advantages), constant(token_weights)
    count = jnp.sum(mask, dtype=logprobs.dtype)
    metrics = {}

    def measure(name: str, values: Array) -> None:
        metrics[name] = (jax.lax.stop_gradient(jnp.sum(clean(values), dtype=count.dtype)), count)

    if old_logprobs is not None:
        old = constant(old_logprobs)
    else:
        old = jax.lax.stop_gradient(logprobs) if config.on_policy else behaviour
    log_ratio, mismatch = logprobs - old, old - behaviour
    if config.kind == "gspo":
        log_ratio = sequence_mean(log_ratio, mask, segment_ids, context_axis)
        mismatch = sequence_mean(mismatch, mask, segment_ids, context_axis)

    surrogate = clipped_surrogate(log_ratio, advantages, config)
    loss = surrogate.loss
    if config.importance_cap is not None and old is not behaviour:
        importance = truncated_importance(mismatch, config.importance_cap)
        loss = loss * importance
        measure("importance_weight", importance)
        measure("importance_capped", mismatch > math.log(config.importance_cap))
    if reference_logprobs is not None:
        divergence = kl_k3(logprobs - constant(reference_logprobs))
        measure("kl_reference", divergence)
        if config.kl_coefficient:
            loss = loss + config.kl_coefficient * divergence

    drift = jax.lax.stop_gradient(logprobs) - behaviour
    measure("ratio", surrogate.ratio)
    measure("clip_fraction_low", surrogate.clipped_low)
    measure("clip_fraction_high", surrogate.clipped_high)
    if config.dual_clip is not None:
        measure("clip_fraction_dual", surrogate.clipped_dual)
    measure("kl_behaviour", kl_k3(-drift))
    metrics["max_log_ratio"] = (jnp.max(jnp.abs(drift), initial=0), jnp.minimum(count, 1))
    if entropy is not None:
        measure("entropy", entropy)
    return jnp.sum(clean(loss * weights)), metrics
