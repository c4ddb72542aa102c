"""From logits to the distribution that tokens are really drawn from.

Temperature, then top-k, top-p and min-p, each on what the one before left. The same function
serves the policy and the draft, so that acceptance compares the two distributions that were used.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

REMOVED = -1e30
"""Log-probability of a token that no draw can return: finite, so that differences stay finite."""

_INFINITY_BITS = 0x7F800000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn from the logits.

    Attributes:
      temperature: divides the logits; 0 is greedy (the other settings then change nothing).
      top_k: keep the k most probable tokens; 0 keeps all, and so does a k beyond the vocabulary.
      top_p: keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
      min_p: keep tokens at least this fraction as probable as the most probable; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps every token), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 keeps every token), got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def process_logits(
    logits: Float[Array, "*rows vocab"], config: SamplingConfig
) -> Float[Array, "*rows vocab"]:
    """Returns the log-probabilities of the distribution that tokens are drawn from.

    Equally probable tokens are told apart by id, the lower one being kept, so that top-k keeps
    exactly k tokens and top-p the smallest set whose float32 mass reaches `top_p` times the mass
    that top-k left. Min-p looks at the most probable token, which nothing removes. Without
    truncation this is one log-softmax; top-p without top-k is the dearest, about 35 reads of the
    logits.

    Args:
      logits: unnormalised scores; computed with in float32. -inf marks a forbidden token.
      config: temperature and truncation, all static.

    Returns:
      float32 log-probabilities, natural log, normalised over the kept tokens; `REMOVED` for the
      others. Greedy gives 0 to the largest logit, the lowest id of several.
    """
    logits = logits.astype(jnp.float32)
    vocab = logits.shape[-1]
    if config.greedy:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        return jnp.where(jnp.arange(vocab) == best, 0.0, REMOVED).astype(jnp.float32)
    if config.temperature != 1:
        logits = logits / config.temperature

    if 0 < config.top_k < vocab:
        keep = _keep_top_k(logits, config)
    elif config.top_p < 1 or config.min_p > 0:
        distance = jnp.max(logits, axis=-1, keepdims=True) - logits
        keep = _keep_top_p(distance, config.top_p) if config.top_p < 1 else True
        if config.min_p > 0:
            keep &= distance <= -math.log(config.min_p)
    else:
        return jnp.maximum(jax.nn.log_softmax(logits, axis=-1), REMOVED)
    return jnp.maximum(jax.nn.log_softmax(jnp.where(keep, logits, -jnp.inf), axis=-1), REMOVED)


def _keep_top_k(
    logits: Float[Array, "*rows vocab"], config: SamplingConfig
) -> Bool[Array, "*rows vocab"]:
    """Marks what top-k, top-p and min-p keep; all three are a prefix of the k largest."""
    values, ids = jax.lax.top_k(logits, config.top_k)
    # A slice of `values` would be merged into XLA's top-k and turn that into a full sort.
    distance = jnp.max(values, axis=-1, keepdims=True) - values
    mass = jnp.cumsum(jnp.exp(-distance), axis=-1)
    # A token stays while the mass before it falls short.
    keep = jnp.ones_like(mass, dtype=bool)
    if config.top_p < 1:
        keep = keep.at[..., 1:].set(mass[..., :-1] < config.top_p * mass[..., -1:])
    if config.min_p > 0:
        keep &= distance <= -math.log(config.min_p)
    last = jnp.sum(keep, axis=-1, keepdims=True) - 1
    value = jnp.take_along_axis(values, last, axis=-1)
    tied = (logits == value) & (jnp.arange(logits.shape[-1]) <= jnp.take_along_axis(ids, last, -1))
    return (logits > value) | tied


def _keep_top_p(distance: Float[Array, "*rows vocab"], top_p: float) -> Bool[Array, "*rows vocab"]:
    """Marks the smallest set of nearest tokens with `top_p` of the mass, lower ids first.

    Distances from the largest logit are not negative, so that their bits sort as they do. The cut
    is found by bisection on these bits, which is exact after 31 halvings and reads the row once
    for each where a sort would move it.
    """
    bits = jax.lax.bitcast_convert_type(distance, jnp.int32)
    mass = jnp.exp(-distance)
    target = top_p * jnp.sum(mass, axis=-1, keepdims=True)

    def mass_of(kept: Bool[Array, "*rows vocab"]) -> Float[Array, "*rows 1"]:
        return jnp.sum(jnp.where(kept, mass, 0.0), axis=-1, keepdims=True)

    before = jnp.full_like(bits[..., :1], -1)
    cut = _bisect(lambda at: mass_of(bits <= at) >= target, before, _INFINITY_BITS)
    nearer, tied = bits < cut, bits == cut
    each = jnp.max(jnp.where(tied, mass, 0.0), axis=-1, keepdims=True)
    missing = (target - mass_of(nearer)) / jnp.where(each > 0, each, 1.0)
    wanted = jnp.maximum(jnp.ceil(missing), 1.0)
    # More ties than wanted are rare; only then is the cut among their ids searched for.
    surplus = jnp.any(jnp.sum(tied, axis=-1, keepdims=True) > wanted)
    return nearer | jax.lax.cond(surplus, _lowest_ids, lambda marked, _: marked, tied, wanted)


def _lowest_ids(
    marked: Bool[Array, "*rows vocab"], count: Float[Array, "*rows 1"]
) -> Bool[Array, "*rows vocab"]:
    """Keeps the `count` marked tokens of lowest id."""
    ids = jnp.arange(marked.shape[-1])

    def reached(last: Int[Array, "*rows 1"]) -> Bool[Array, "*rows 1"]:
        return jnp.sum(marked & (ids <= last), axis=-1, keepdims=True) >= count

    before = jnp.full_like(marked[..., :1], -1, dtype=jnp.int32)
    return marked & (ids <= _bisect(reached, before, marked.shape[-1] - 1))


def _bisect(reached, low: Int[Array, "*rows 1"], high: int) -> Int[Array, "*rows 1"]:
    """Returns the smallest integer in (low, high] where the monotone `reached` holds, else high."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = reached(middle)
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    steps = int(high + 1).bit_length()
    return jax.lax.fori_loop(0, steps, halve, (low, jnp.full_like(low, high)))[1]
