"""Attention in tiles: reads only the key tiles that intervals touch, stores no square array.

Query tiles are scanned one after another. Each runs, per range, a loop over the key tiles between
the lowest start and the highest end among its rows, and keeps an online softmax (Milakov and
Gimelshein, arXiv 1805.02867) that the row's private branch has opened. All query heads of a tile
that share a key/value head are the rows of one matrix product.

The backward pass (Dao, arXiv 2307.08691, algorithm 2) recomputes the probabilities from the joint
log-sum-exp. With p_j = exp(s_j - lse), the derivative of the scores is
ds_j = p_j (dout.v_j - dout.out + dlse), which holds for trunk and branch alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxspec.attention.spec import MASKED, check_arguments
from jaxspec.compat import vary, varying_axes

# Rows of packed short documents see little of a trunk this short: small tiles skip more of it than
# they cost (measured on a CPU).
SHORT_TRUNK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What is fixed at trace time: factor of the scores and the largest tile sizes."""

    scale: float
    query_tile: int
    key_tile: int


def _tile_size(length: int, largest: int) -> int:
    """Returns the tile that cuts `length` into as few and as equal parts as `largest` allows."""
    parts = max(1, -(-length // largest))
    size = -(-length // parts)
    return -(-size // 8) * 8


def _cut(x: jax.Array, size: int) -> jax.Array:
    """[batch, length, ...] -> [batch * tiles, size, ...], padded with zeros at the end."""
    short = -x.shape[1] % size
    if short:
        x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def _join(x: jax.Array, batch: int, length: int) -> jax.Array:
    """Undoes `_cut`."""
    return x.reshape(batch, -1, *x.shape[2:])[:, :length]


def _query_tiles(x: jax.Array, size: int, kv_heads: int) -> jax.Array:
    """[batch, time, q_heads, ...] -> [tiles, kv_heads, group, size, ...]."""
    x = _cut(x, size)
    x = x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _from_query_tiles(x: jax.Array, batch: int, time: int) -> jax.Array:
    x = jnp.moveaxis(x, 3, 1)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return _join(x, batch, time)


def _key_tiles(x: jax.Array, size: int) -> jax.Array:
    """[batch, keys, kv_heads, dim] -> [tiles, kv_heads, size, dim]."""
    return _cut(x, size).swapaxes(1, 2)


def _branch_tiles(x: jax.Array, size: int) -> jax.Array:
    """[batch, time, p, kv_heads, dim] -> [tiles, p, kv_heads, 1, size, dim]."""
    return jnp.transpose(_cut(x, size), (0, 2, 3, 1, 4))[:, :, :, None]


def _from_branch_tiles(x: jax.Array, batch: int, time: int) -> jax.Array:
    return _join(jnp.transpose(x[:, :, :, 0], (0, 3, 1, 2, 4)), batch, time)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Product of [kv_heads, ., .] arrays over one dimension of each, accumulated wide."""
    dims = (((over_a,), (over_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=_wide(a))


def _touched(lo: jax.Array, hi: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the key tiles [first, last) between the ranges of a query tile, [size] each."""
    live = lo < hi
    first = jnp.where(live, lo, jnp.iinfo(jnp.int32).max).min() // size
    last = -(-jnp.where(live, hi, 0).max() // size)
    return jnp.minimum(first, last), last


def _visible(lo: jax.Array, hi: jax.Array, tile: jax.Array, size: int) -> jax.Array:
    keys = tile * size + jax.lax.iota(jnp.int32, size)
    return (keys >= lo[:, None]) & (keys < hi[:, None])


def _own_scores(x: jax.Array, branch: jax.Array) -> jax.Array:
    """[kv_heads, group, rows, dim] x [p, kv_heads, 1, rows, dim] -> [p, kv_heads, group, rows].

    A product and a sum: as a matrix product each row would be a problem of its own.
    """
    return (x.astype(_wide(x)) * branch.astype(_wide(x))).sum(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Operands:
    """The operands cut into tiles, and how many tiles and rows there are."""

    q: jax.Array  # [query tiles, kv_heads, group, rows, dim]
    k: jax.Array  # [key tiles, kv_heads, size, dim]
    v: jax.Array
    branch: tuple[jax.Array, ...]  # () or keys, values [query tiles, p, kv_heads, 1, rows, dim]
    ranges: jax.Array  # [query tiles, n, 2, rows]
    batch_row: jax.Array  # [query tiles]
    rows: int
    size: int
    tiles_per_row: int

    @classmethod
    def cut(cls, static: _Static, q, k, v, branch, intervals) -> "_Operands":
        rows = _tile_size(q.shape[1], static.query_tile)
        size = _tile_size(k.shape[1], static.key_tile)
        q_tiles = _query_tiles(q, rows, k.shape[2])
        k_tiles = _key_tiles(k, size)
        count = q_tiles.shape[0]
        return cls(
            q=q_tiles,
            k=k_tiles,
            v=_key_tiles(v, size),
            branch=tuple(_branch_tiles(x, rows) for x in branch),
            ranges=jnp.moveaxis(_cut(intervals, rows), 1, 3),
            batch_row=jnp.arange(count, dtype=jnp.int32) // (count // q.shape[0]),
            rows=rows,
            size=size,
            tiles_per_row=k_tiles.shape[0] // q.shape[0],
        )


def _pick(tiles: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(tiles, index, 0, keepdims=False)


def _add_at(tiles: jax.Array, index: jax.Array, more: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(tiles, _pick(tiles, index) + more, index, 0)


def _forward(static: _Static, q, k, v, branch, intervals):
    ops = _Operands.cut(static, q, k, v, branch, intervals)
    axes, wide, size = sorted(varying_axes(q)), _wide(q), ops.size

    def query_tile(_, tile):
        batch_row, q_tile, branch_tile, ranges = tile
        heads, group, rows, dim = q_tile.shape
        flat = q_tile.reshape(heads, group * rows, dim)

        def key_tile(lo, hi, j, state):
            top, total, acc = state
            at = batch_row * ops.tiles_per_row + j
            scores = _dot(flat, _pick(ops.k, at), 2, 2).reshape(heads, group, rows, size)
            scores = jnp.where(_visible(lo, hi, j, size), scores * static.scale, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing yet keeps exp(MASKED - 0) = 0 instead of exp(0) = 1.
            shift = jnp.where(new_top > MASKED / 2, new_top, 0.0)
            weights = jnp.exp(scores - shift[..., None])
            fade = jnp.exp(top - shift)
            flat_weights = weights.reshape(heads, group * rows, size).astype(v.dtype)
            mixed = _dot(flat_weights, _pick(ops.v, at), 2, 1).reshape(acc.shape)
            return new_top, total * fade + weights.sum(-1), acc * fade[..., None] + mixed

        if branch_tile:
            own = _own_scores(q_tile, branch_tile[0]) * static.scale
            top = own.max(0)
            weights = jnp.exp(own - top)
            acc = (weights[..., None] * branch_tile[1].astype(wide)).sum(0)
            state = top, weights.sum(0), acc
        else:
            top = jnp.full((heads, group, rows), MASKED, wide)
            state = vary((top, jnp.zeros_like(top), jnp.zeros(q_tile.shape, wide)), axes)
        for lo, hi in ranges:
            body = functools.partial(key_tile, lo, hi)
            state = jax.lax.fori_loop(*_touched(lo, hi, size), body, state)
        top, total, acc = state
        seen = top > MASKED / 2
        total = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top + jnp.log(total), MASKED)
        return None, ((acc / total[..., None]).astype(q.dtype), lse)

    xs = ops.batch_row, ops.q, ops.branch, ops.ranges
    _, (out, lse) = jax.lax.scan(query_tile, None, xs)
    batch, time = q.shape[:2]
    return _from_query_tiles(out, batch, time), _from_query_tiles(lse, batch, time)


def _backward(static: _Static, residuals, cotangents):
    q, k, v, branch, intervals, out, lse = residuals
    d_out, d_lse = cotangents
    ops = _Operands.cut(static, q, k, v, branch, intervals)
    axes, wide, size = sorted(varying_axes(q)), _wide(q), ops.size
    # What every score of a row loses: dout.out, less the cotangent of the row's lse.
    delta = (d_out.astype(wide) * out.astype(wide)).sum(-1) - d_lse
    cut = functools.partial(_query_tiles, size=ops.rows, kv_heads=k.shape[2])

    def query_tile(carry, tile):
        batch_row, q_tile, branch_tile, ranges, d_out_tile, lse_tile, delta_tile = tile
        heads, group, rows, dim = q_tile.shape
        flat = q_tile.reshape(heads, group * rows, dim)
        flat_d_out = d_out_tile.reshape(heads, group * rows, dim)

        def key_tile(lo, hi, j, state):
            dk, dv, dq = state
            at = batch_row * ops.tiles_per_row + j
            k_tile = _pick(ops.k, at)
            scores = _dot(flat, k_tile, 2, 2).reshape(heads, group, rows, size) * static.scale
            scores = jnp.where(_visible(lo, hi, j, size), scores - lse_tile[..., None], MASKED)
            probs = jnp.exp(scores)
            d_probs = _dot(flat_d_out, _pick(ops.v, at), 2, 2).reshape(probs.shape)
            d_scores = probs * (d_probs - delta_tile[..., None]) * static.scale
            flat_probs = probs.reshape(heads, group * rows, size).astype(q.dtype)
            flat_d_scores = d_scores.reshape(flat_probs.shape).astype(q.dtype)
            # [kv_heads, dim, size]: transposing the small operand is twice as fast on a CPU.
            dk = _add_at(dk, at, _dot(flat, flat_d_scores, 1, 1))
            dv = _add_at(dv, at, _dot(flat_d_out, flat_probs, 1, 1))
            return dk, dv, dq + _dot(flat_d_scores, k_tile, 2, 1)

        state = *carry, vary(jnp.zeros(flat.shape, wide), axes)
        for lo, hi in ranges:
            body = functools.partial(key_tile, lo, hi)
            state = jax.lax.fori_loop(*_touched(lo, hi, size), body, state)
        dk, dv, dq = state
        dq = dq.reshape(q_tile.shape)
        d_branch = ()
        if branch_tile:
            branch_dq, d_branch = _branch_backward(
                static.scale, q_tile, branch_tile, d_out_tile, lse_tile, delta_tile
            )
            dq += branch_dq
        return (dk, dv), (dq.astype(q.dtype), d_branch)

    zeros = jnp.zeros(ops.k.swapaxes(2, 3).shape, wide)
    zeros = vary((zeros, zeros), axes)
    xs = ops.batch_row, ops.q, ops.branch, ops.ranges, cut(d_out), cut(lse), cut(delta)
    (dk, dv), (dq, d_branch) = jax.lax.scan(query_tile, zeros, xs)
    batch, time = q.shape[:2]
    return (
        _from_query_tiles(dq, batch, time),
        _join(jnp.transpose(dk, (0, 3, 1, 2)), batch, k.shape[1]).astype(k.dtype),
        _join(jnp.transpose(dv, (0, 3, 1, 2)), batch, v.shape[1]).astype(v.dtype),
        tuple(_from_branch_tiles(x, batch, time) for x in d_branch),
        None,
    )


def _branch_backward(scale, q, branch, d_out, lse, delta):
    """Gradients of one query tile through its branch: dq, and (dkeys, dvalues) as stored."""
    branch_k, branch_v = branch
    wide = _wide(q)
    probs = jnp.exp(_own_scores(q, branch_k) * scale - lse)
    d_scores = probs * (_own_scores(d_out, branch_v) - delta) * scale
    dq = (d_scores[..., None] * branch_k.astype(wide)).sum(0)
    dk = (d_scores[..., None] * q.astype(wide)).sum(2, keepdims=True)
    dv = (probs[..., None] * d_out.astype(wide)).sum(2, keepdims=True)
    return dq, (dk.astype(branch_k.dtype), dv.astype(branch_v.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q, k, v, branch, intervals):
    return _forward(static, q, k, v, branch, intervals)


def _attend_forward(static: _Static, q, k, v, branch, intervals):
    out, lse = _forward(static, q, k, v, branch, intervals)
    # Named so that rematerialisation may keep them and leave the tiles alone.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, branch, intervals, out, lse)


_attend.defvjp(_attend_forward, _backward)


def attend(
    q: Float[Array, "batch time q_heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    intervals: Int[Array, "batch time n 2"],
    *,
    branch_k: Float[Array, "batch time p kv_heads dim"] | None = None,
    branch_v: Float[Array, "batch time p kv_heads dim"] | None = None,
    scale: float | None = None,
    query_tile: int | None = None,
    key_tile: int | None = None,
) -> tuple[Float[Array, "batch time q_heads dim"], Float[Array, "batch time q_heads"]]:
    """Attends from every query row to its intervals of the trunk and to its own branch.

    The same function as `jaxspec.attention.reference.attend`, in memory that grows with time and
    not with its square. Under `jax.checkpoint`, a policy that saves the names "attention_out" and
    "attention_lse" spares the second forward pass.

    Args:
      q: queries.
      k: trunk keys.
      v: trunk values.
      intervals: disjoint half-open ranges of trunk rows that each query row sees, inside
        [0, keys) (`spec.check_intervals`); query rows that stand near each other should see keys
        that do, as tiles are visited from the lowest to the highest row that any of them sees.
      branch_k: p further keys that only their own query row sees; always visible to it.
      branch_v: the branch's values.
      scale: factor of the scores; 1 / sqrt(dim) when None.
      query_tile: largest number of query rows of a tile; chosen by the length of the trunk when
        None.
      key_tile: largest number of trunk rows of a tile; as query_tile.

    Returns:
      out, in q's dtype, zero for a row that sees nothing; and the natural log-sum-exp of the
      scaled scores, float32 (float64 for float64 inputs), -1e30 for a row that sees nothing.
      Both are differentiable.

    Raises:
      ValueError: if shapes do not fit each other, or a tile is smaller than one row.
    """
    check_arguments(q, k, v, intervals, branch_k, branch_v)
    short = k.shape[1] <= SHORT_TRUNK
    query_tile = query_tile if query_tile is not None else 32 if short else 128
    key_tile = key_tile if key_tile is not None else 64 if short else 128
    if query_tile < 1 or key_tile < 1:
        raise ValueError(f"query_tile {query_tile} and key_tile {key_tile} must be at least 1")
    branch = () if branch_k is None or branch_k.shape[2] == 0 else (branch_k, branch_v)
    operands = q, k, v, branch, intervals.astype(jnp.int32)
    # A cotangent must vary over the mesh axes of its primal; marking the operands first makes the
    # transpose of the mark reduce the gradients of replicated ones.
    axes = sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(operands))))
    static = _Static(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        query_tile=query_tile,
        key_tile=key_tile,
    )
    return _attend(static, *vary(operands, axes))
