"""What "acceptance" means: several numbers go by that name, and each is reported by its own.

All come from totals that add up over rows, steps and devices, so none is a mean of means.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_by_position(accepted: Int[Array, " n"], num_draft: int) -> Int[Array, " k"]:
    """Returns how many of n verifies accepted at least j proposals, for j = 1..num_draft."""
    return jnp.sum(accepted[:, None] > jnp.arange(num_draft), axis=0)


def acceptance_metrics(
    verifies: int, accepted: Sequence[int], emitted: int, drafted: int | None = None
) -> dict[str, float]:
    """Names the ways in which a draft can be said to be accepted.

    Args:
      verifies: verifies run, each over k proposals and one more position.
      accepted: for j = 1..k, the verifies that emitted at least j accepted proposals; proposals
        dropped behind a stop token or the length cap are not counted.
      emitted: tokens that these verifies emitted, corrections and bonus tokens included.
      drafted: proposals made; k a verify when None.

    Returns:
      acceptance_length: tokens emitted a verify, bonus or correction included (1 to k+1).
      acceptance_rate: accepted proposals out of all that were made.
      acceptance_position_j: share of the verifies that accepted proposal j.
      acceptance_conditional_j: the same out of those verifies that accepted proposal j - 1.
      A share of nothing is 0.
    """
    accepted = [int(count) for count in accepted]
    verifies = int(verifies)
    drafted = verifies * len(accepted) if drafted is None else int(drafted)
    reached = [verifies, *accepted]
    if any(later > earlier for earlier, later in zip(reached, accepted, strict=False)):
        raise ValueError(
            f"accepted must not rise with the position nor exceed {verifies} verifies, "
            f"got {accepted}"
        )

    def share(part: int, whole: int) -> float:
        return part / whole if whole else 0.0

    metrics = {
        "acceptance_length": share(int(emitted), verifies),
        "acceptance_rate": share(sum(accepted), drafted),
    }
    for j, count in enumerate(accepted, start=1):
        metrics[f"acceptance_position_{j}"] = share(count, verifies)
        metrics[f"acceptance_conditional_{j}"] = share(count, reached[j - 1])
    return metrics
