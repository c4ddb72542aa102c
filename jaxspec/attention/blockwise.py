"""Attention in tiles: reads only the key tiles that intervals touch, stores no square array.

Query tiles are scanned a few at a time, so that every operation is large enough for all cores. They
run, per range, a loop over the key tiles between the lowest start and the highest end among a
tile's rows, and keep an online softmax (Milakov and Gimelshein, arXiv 1805.02867) that the row's
private branch has opened. All query heads of a tile that share a key/value head are the rows of one
matrix product.

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
from jaxspec.compat import row_sum, sum_of_products, vary, varying_axes

# Rows of packed short documents see little of a trunk this short: small tiles skip more of it than
# they cost (measured on a CPU).
SHORT_TRUNK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What is fixed at trace time: factor of the scores, the largest tiles and bundles."""

    scale: float
    query_tile: int
    key_tile: int
    rows_at_once: int


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


def _bundle(x: jax.Array, tiles: int) -> jax.Array:
    """[all tiles, ...] -> [bundles, tiles, ...], padded with tiles of zeros at the end."""
    short = -x.shape[0] % tiles
    if short:
        x = jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, tiles, *x.shape[1:])


def _key_tiles(x: jax.Array, size: int) -> jax.Array:
    """[batch, keys, kv_heads, dim] -> [tiles, kv_heads, size, dim]."""
    return _cut(x, size).swapaxes(1, 2)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Product of [tiles * kv_heads, ., .] arrays over one dimension of each, accumulated wide."""
    dims = (((over_a,), (over_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=_wide(a))


def _touched(lo: jax.Array, hi: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns where the key tiles of each query tile begin, [tiles], and the most that any has.

    The ranges lo and hi are [tiles, rows].
    """
    live = lo < hi
    first = jnp.where(live, lo, jnp.iinfo(jnp.int32).max).min(-1) // size
    last = -(-jnp.where(live, hi, 0).max(-1) // size)
    first = jnp.minimum(first, last)
    return first, jnp.max(last - first)


def _visible(lo: jax.Array, hi: jax.Array, tile: jax.Array, size: int) -> jax.Array:
    """[tiles, 1, 1, rows, size]: which keys of tile [tiles] lie in the ranges [tiles, rows]."""
    keys = (tile[:, None] * size + jax.lax.iota(jnp.int32, size))[:, None]
    return ((keys >= lo[..., None]) & (keys < hi[..., None]))[:, None, None]


def _own_scores(x: jax.Array, branch: jax.Array) -> jax.Array:
    """[tiles, kv_heads, group, rows, dim] x [tiles, p, kv_heads, 1, rows, dim] -> without dim.

    A product and a sum: as a matrix product each row would be a problem of its own.
    """
    return row_sum(x[:, None].astype(_wide(x)) * branch.astype(_wide(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """How rows are cut into tiles, and tiles bundled.

    Attributes:
      rows: query rows of a tile.
      size: trunk rows of a tile.
      together: query tiles of a bundle.
      kv_heads: key/value heads.
      batch: sequences.
      time: query rows of a sequence.
      key_tiles: trunk tiles of a sequence.
    """

    rows: int
    size: int
    together: int
    kv_heads: int
    batch: int
    time: int
    key_tiles: int

    @classmethod
    def of(cls, static: _Static, q: jax.Array, k: jax.Array) -> "_Tiling":
        rows = _tile_size(q.shape[1], static.query_tile)
        size = _tile_size(k.shape[1], static.key_tile)
        tiles = q.shape[0] * -(-q.shape[1] // rows)
        bundles = -(-tiles // max(1, static.rows_at_once // rows))
        return cls(
            rows=rows,
            size=size,
            together=-(-tiles // bundles),
            kv_heads=k.shape[2],
            batch=q.shape[0],
            time=q.shape[1],
            key_tiles=-(-k.shape[1] // size),
        )

    def queries(self, x: jax.Array) -> jax.Array:
        """[batch, time, q_heads, ...] -> [bundles, tiles, kv_heads, group, rows, ...]."""
        x = _cut(x, self.rows)
        x = x.reshape(*x.shape[:2], self.kv_heads, -1, *x.shape[3:])
        return _bundle(jnp.moveaxis(x, 1, 3), self.together)

    def from_queries(self, x: jax.Array) -> jax.Array:
        """Undoes `queries`."""
        x = jnp.moveaxis(self._unbundle(x), 3, 1)
        return _join(x.reshape(*x.shape[:2], -1, *x.shape[4:]), self.batch, self.time)

    def branch(self, x: jax.Array) -> jax.Array:
        """[batch, time, p, kv_heads, dim] -> [bundles, tiles, p, kv_heads, 1, rows, dim]."""
        x = jnp.transpose(_cut(x, self.rows), (0, 2, 3, 1, 4))[:, :, :, None]
        return _bundle(x, self.together)

    def from_branch(self, x: jax.Array) -> jax.Array:
        """Undoes `branch`."""
        x = jnp.transpose(self._unbundle(x)[:, :, :, 0], (0, 3, 1, 2, 4))
        return _join(x, self.batch, self.time)

    def ranges(self, intervals: jax.Array) -> jax.Array:
        """[batch, time, n, 2] -> [bundles, n, 2, tiles, rows]."""
        x = _bundle(_cut(intervals, self.rows), self.together)
        return jnp.transpose(x, (0, 3, 4, 1, 2))

    def first_keys(self) -> jax.Array:
        """[bundles, tiles]: where the key tiles of each query tile's sequence begin."""
        per_row = -(-self.time // self.rows)
        starts = jnp.arange(self.batch * per_row, dtype=jnp.int32) // per_row * self.key_tiles
        return _bundle(starts, self.together)

    def _unbundle(self, x: jax.Array) -> jax.Array:
        tiles = self.batch * -(-self.time // self.rows)
        return x.reshape(-1, *x.shape[2:])[:tiles]


def _forward(static: _Static, q, k, v, branch, intervals):
    tiling = _Tiling.of(static, q, k)
    axes, wide, size = sorted(varying_axes(q)), _wide(q), tiling.size
    k_tiles, v_tiles = _key_tiles(k, size), _key_tiles(v, size)

    def bundle(_, xs):
        start, q_tile, branch_tile, ranges = xs
        tiles, heads, group, rows, dim = q_tile.shape
        flat = q_tile.reshape(tiles * heads, group * rows, dim)

        def key_tile(lo, hi, first, j, state):
            top, total, acc = state
            tile = first + j
            at = start + jnp.minimum(tile, tiling.key_tiles - 1)
            keys, values = (x[at].reshape(tiles * heads, size, dim) for x in (k_tiles, v_tiles))
            scores = _dot(flat, keys, 2, 2).reshape(tiles, heads, group, rows, size)
            scores = jnp.where(_visible(lo, hi, tile, size), scores * static.scale, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing yet keeps exp(MASKED - 0) = 0 instead of exp(0) = 1.
            shift = jnp.where(new_top > MASKED / 2, new_top, 0.0)
            weights = jnp.exp(scores - shift[..., None])
            fade = jnp.exp(top - shift)
            flat_weights = weights.reshape(tiles * heads, group * rows, size).astype(v.dtype)
            mixed = _dot(flat_weights, values, 2, 1).reshape(acc.shape)
            return new_top, total * fade + weights.sum(-1), acc * fade[..., None] + mixed

        if branch_tile:
            own = _own_scores(q_tile, branch_tile[0]) * static.scale
            top = own.max(1)
            weights = jnp.exp(own - top[:, None])
            acc = (weights[..., None] * branch_tile[1].astype(wide)).sum(1)
            state = top, weights.sum(1), acc
        else:
            top = jnp.full((tiles, heads, group, rows), MASKED, wide)
            state = vary((top, jnp.zeros_like(top), jnp.zeros(q_tile.shape, wide)), axes)
        for lo, hi in ranges:
            first, count = _touched(lo, hi, size)
            body = functools.partial(key_tile, lo, hi, first)
            state = jax.lax.fori_loop(0, count, body, state)
        top, total, acc = state
        seen = top > MASKED / 2
        total = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top + jnp.log(total), MASKED)
        return None, ((acc / total[..., None]).astype(q.dtype), lse)

    own = tuple(map(tiling.branch, branch))
    xs = tiling.first_keys(), tiling.queries(q), own, tiling.ranges(intervals)
    _, (out, lse) = jax.lax.scan(bundle, None, xs)
    return tiling.from_queries(out), tiling.from_queries(lse)


def _backward(static: _Static, residuals, cotangents):
    q, k, v, branch, intervals, out, lse = residuals
    d_out, d_lse = cotangents
    tiling = _Tiling.of(static, q, k)
    axes, wide, size = sorted(varying_axes(q)), _wide(q), tiling.size
    k_tiles, v_tiles = _key_tiles(k, size), _key_tiles(v, size)
    # What every score of a row loses: dout.out, less the cotangent of the row's lse.
    delta = sum_of_products(d_out.astype(wide), out.astype(wide)) - d_lse

    def bundle(carry, xs):
        start, q_tile, branch_tile, ranges, d_out_tile, lse_tile, delta_tile = xs
        tiles, heads, group, rows, dim = q_tile.shape
        flat = q_tile.reshape(tiles * heads, group * rows, dim)
        flat_d_out = d_out_tile.reshape(flat.shape)
        # Turned once here instead of in every product of the loop.
        q_turned, d_out_turned = flat.swapaxes(1, 2), flat_d_out.swapaxes(1, 2)

        def key_tile(lo, hi, first, j, state):
            dk, dv, dq = state
            tile = first + j
            at = start + jnp.minimum(tile, tiling.key_tiles - 1)
            keys, values = (x[at].reshape(tiles * heads, size, dim) for x in (k_tiles, v_tiles))
            scores = _dot(flat, keys, 2, 2).reshape(tiles, heads, group, rows, size) * static.scale
            visible = _visible(lo, hi, tile, size)
            probs = jnp.exp(jnp.where(visible, scores - lse_tile[..., None], MASKED))
            d_probs = _dot(flat_d_out, values, 2, 2).reshape(probs.shape)
            d_scores = probs * (d_probs - delta_tile[..., None]) * static.scale
            flat_probs = probs.reshape(tiles * heads, group * rows, size).astype(q.dtype)
            flat_d_scores = d_scores.reshape(flat_probs.shape).astype(q.dtype)
            more_dk = _dot(q_turned, flat_d_scores, 2, 1).reshape(tiles, *dk.shape[1:])
            more_dv = _dot(d_out_turned, flat_probs, 2, 1).reshape(tiles, *dv.shape[1:])
            dk, dv = dk.at[at].add(more_dk), dv.at[at].add(more_dv)
            return dk, dv, dq + _dot(flat_d_scores, keys, 2, 1)

        state = *carry, vary(jnp.zeros(flat.shape, wide), axes)
        for lo, hi in ranges:
            first, count = _touched(lo, hi, size)
            body = functools.partial(key_tile, lo, hi, first)
            state = jax.lax.fori_loop(0, count, body, state)
        dk, dv, dq = state
        dq = dq.reshape(q_tile.shape)
        d_branch = ()
        if branch_tile:
            branch_dq, d_branch = _branch_backward(
                static.scale, q_tile, branch_tile, d_out_tile, lse_tile, delta_tile
            )
            dq += branch_dq
        return (dk, dv), (dq.astype(q.dtype), d_branch)

    zeros = jnp.zeros(k_tiles.swapaxes(2, 3).shape, wide)
    zeros = vary((zeros, zeros), axes)
    own = tuple(map(tiling.branch, branch))
    rows = tuple(map(tiling.queries, (d_out, lse, delta)))
    xs = tiling.first_keys(), tiling.queries(q), own, tiling.ranges(intervals), *rows
    (dk, dv), (dq, d_branch) = jax.lax.scan(bundle, zeros, xs)
    keys_shape = k.shape[:2]
    return (
        tiling.from_queries(dq),
        _join(jnp.transpose(dk, (0, 3, 1, 2)), *keys_shape).astype(k.dtype),
        _join(jnp.transpose(dv, (0, 3, 1, 2)), *keys_shape).astype(v.dtype),
        tuple(map(tiling.from_branch, d_branch)),
        None,
    )


def _branch_backward(scale, q, branch, d_out, lse, delta):
    """Gradients of query tiles through their branch: dq, and (dkeys, dvalues) as stored."""
    branch_k, branch_v = branch
    wide = _wide(q)
    probs = jnp.exp(_own_scores(q, branch_k) * scale - lse[:, None])
    d_scores = probs * (_own_scores(d_out, branch_v) - delta[:, None]) * scale
    dq = (d_scores[..., None] * branch_k.astype(wide)).sum(1)
    dk = (d_scores[..., None] * q[:, None].astype(wide)).sum(3, keepdims=True)
    dv = (probs[..., None] * d_out[:, None].astype(wide)).sum(3, keepdims=True)
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
    rows_at_once: int = 1024,
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
      rows_at_once: query rows whose tiles are computed together; these wait for the one among
        them that sees most keys.

    Returns:
      out, in q's dtype, zero for a row that sees nothing; and the natural log-sum-exp of the
      scaled scores, float32 (float64 for float64 inputs), -1e30 for a row that sees nothing.
      Both are differentiable.

    Raises:
      ValueError: if shapes do not fit each other, or a tile is smaller than one row.
    """
    check_arguments(q, k, v, intervals, branch_k, branch_v)
    short = k.shape[1] <= SHORT_TRUNK
    query_tile = query_tile if query_tile is not None else 64 if short else 128
    key_tile = key_tile if key_tile is not None else 32 if short else 128
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
        rows_at_once=rows_at_once,
    )
    return _attend(static, *vary(operands, axes))
