"""Draws from weighted rows, and the random keys that make every draw independent.

A key is derived from what identifies the draw: the row, the position of the first token drawn and
the purpose. Neither the sharding nor the order of a batch changes what a row draws.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

BLOCK = 256


class Purpose(enum.IntEnum):
    """What a draw is for; each purpose has its own random numbers.

    Drafting, accepting and emitting must be independent: with shared numbers the output no longer
    follows the policy.
    """

    DRAFT = 1
    ACCEPT = 2
    EMIT = 3


def row_keys(
    key: Key[Array, ""], row_ids: Int[Array, " b"], positions: Int[Array, " b"]
) -> Key[Array, " b"]:
    """Returns one key for each row and position.

    Args:
      key: the rollout's key (typed).
      row_ids: which sequence each row is, whatever its place in the batch.
      positions: tokens generated so far in each row.
    """

    def one(row, position):
        return jax.random.fold_in(jax.random.fold_in(key, row), position)

    return jax.vmap(one)(row_ids, positions)


def purpose_keys(
    keys: Key[Array, " b"], purpose: Purpose, index: int | Int[Array, ""] = 0
) -> Key[Array, " b"]:
    """Returns the rows' keys for one purpose.

    Args:
      keys: from `row_keys`.
      purpose: what is drawn.
      index: tells apart several draws for that purpose, e.g. the place in the draft's block.
    """

    def one(key):
        return jax.random.fold_in(jax.random.fold_in(key, int(purpose)), index)

    return jax.vmap(one)(keys)


def uniforms(keys: Key[Array, " b"], count: int) -> Float[Array, "b count"]:
    """Returns `count` independent uniform numbers in [0, 1) for each key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(keys)


def sample(
    weights: Float[Array, "rows vocab"], uniforms: Float[Array, "rows 2"]
) -> Int[Array, " rows"]:
    """Draws one id a row with probability proportional to its weight.

    Inverts the cumulative sum in two levels: a block of the vocabulary, then a token in it. Only
    block sums and one block are accumulated, and each level has its own uniform number, so that
    the resolution of float32 (2^-23) is relative to the block rather than to the whole row.

    Args:
      weights: non-negative and not all zero in a row; they need not sum to one.
      uniforms: two independent numbers in [0, 1) for each row.

    Returns:
      ids whose weight is never zero, whatever the rounding of the sums.
    """
    rows, vocab = weights.shape
    padding = -vocab % BLOCK
    if padding:
        weights = jnp.pad(weights, ((0, 0), (0, padding)))
    blocks = weights.reshape(rows, -1, BLOCK)
    block = _invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    inside = jax.vmap(lambda row, index: row[index])(blocks, block)
    return block * BLOCK + _invert(inside, uniforms[:, 1])


def draw(log_probs: Float[Array, "b vocab"], keys: Key[Array, " b"]) -> Int[Array, " b"]:
    """Draws one id a row from normalised log-probabilities, with keys made for this draw alone."""
    return sample(jnp.exp(log_probs), uniforms(keys, 2))


def _invert(weights: Float[Array, "rows n"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Returns the first index whose cumulative weight exceeds the uniform share of the total."""
    total = jnp.cumsum(weights, axis=-1)
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    # The cumulative sum is a tree of sums: it may rise, or fall, by a rounding where a weight is
    # zero, and the share may round up to the total. Hence the test of the weight itself, and the
    # last index that has one when none is reached.
    hit = positive & (total > uniform[:, None] * total[:, -1:])
    first = jnp.min(jnp.where(hit, index, weights.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.minimum(first, last)
