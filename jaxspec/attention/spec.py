"""What a query row may see: half-open intervals of key rows, their builders and checks.

Packing, causality, windows, shared prompts and padding are all expressed as at most n disjoint
ranges `[lo, hi)` per query row, so keys carry no metadata at all. A range with `lo >= hi` is
empty. The builders accept host (numpy) and device arrays alike and return the same kind.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

# Score of a masked pair and log-sum-exp of an empty row; finite, as -inf - -inf would be nan.
MASKED = -1e30

HostOrDevice = np.ndarray | Array


def _library(*arrays: HostOrDevice) -> ModuleType:
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def _window_start(lo: HostOrDevice, rows: HostOrDevice, window: int | None) -> HostOrDevice:
    if window is None:
        return lo
    if window < 1:
        raise ValueError(f"window is {window}; a row sees at least itself, so window >= 1")
    return _library(lo).maximum(lo, rows + 1 - window)


def _rows(segment_ids: HostOrDevice) -> HostOrDevice:
    xp = _library(segment_ids)
    return xp.broadcast_to(xp.arange(segment_ids.shape[1], dtype=np.int32), segment_ids.shape)


def _stack_live(live: HostOrDevice, lo: HostOrDevice, hi: HostOrDevice) -> HostOrDevice:
    xp = _library(live)
    pair = xp.stack([lo, hi], axis=-1)
    return xp.where(live[..., None], pair, 0).astype(np.int32)


def causal_intervals(
    segment_ids: Int[HostOrDevice, "batch time"],
    positions: Int[HostOrDevice, "batch time"],
    *,
    window: int | None = None,
) -> Int32[HostOrDevice, "batch time 1 2"]:
    """Builds causal visibility inside each document of a packed row, in natural order.

    The rows of a document are contiguous, so row i at position p sees rows [i - p, i + 1).

    Args:
      segment_ids: document of each row; 0 is padding, which sees nothing.
      positions: index of each row in its document, from 0.
      window: number of latest rows (itself included) that a row sees; all of them when None.

    Returns:
      One range per row.

    Raises:
      ValueError: if window is below 1.
    """
    rows = _rows(segment_ids)
    lo = _window_start(rows - positions, rows, window)
    return _stack_live(segment_ids > 0, lo, rows + 1)[:, :, None]


def shared_prefix_intervals(
    segment_ids: Int[np.ndarray, "batch time"],
    prefix_ids: Int[np.ndarray, "batch time"],
    *,
    window: int | None = None,
) -> Int32[np.ndarray, "batch time 2 2"]:
    """Builds visibility where several documents of a row continue one stored prefix.

    A row sees its own segment up to itself, and the whole of the segment its document continues.

    Args:
      segment_ids: segment of each row, contiguous; 0 is padding, which sees nothing.
      prefix_ids: segment that holds the beginning of the row's document; 0 where the row's own
        segment is the beginning. A prefix stands in the same batch row.
      window: number of latest rows of the document (itself included) that a row sees.

    Returns:
      Two ranges per row: the own segment, then the prefix (empty where there is none).

    Raises:
      ValueError: if window is below 1, a segment is not contiguous, or a prefix is absent, or is
        itself the continuation of another one.
    """
    rows = _rows(segment_ids)
    own = np.zeros(segment_ids.shape, np.int32)
    prefix = np.zeros((*segment_ids.shape, 2), np.int32)
    for b, ids in enumerate(segment_ids):
        spans = {}
        for s in np.unique(ids[ids > 0]):
            where = np.flatnonzero(ids == s)
            spans[int(s)] = (where[0], where[-1] + 1)
            if where[-1] + 1 - where[0] != where.size:
                raise ValueError(
                    f"segment {s} of row {b} has {where.size} tokens spread over "
                    f"{where[-1] + 1 - where[0]} places; its rows must be contiguous"
                )
            own[b, where] = where[0]
        for s in np.unique(prefix_ids[b][(ids > 0) & (prefix_ids[b] > 0)]):
            if int(s) not in spans:
                raise ValueError(f"prefix segment {s} is not among the segments of row {b}")
            lo, hi = spans[int(s)]
            if prefix_ids[b, lo:hi].any():
                raise ValueError(f"prefix segment {s} of row {b} continues another segment")
            prefix[b, prefix_ids[b] == s] = lo, hi
    if window is not None:
        # The prefix ends where the own segment begins in the document, wherever both are stored.
        left = window - (rows + 1 - own)
        prefix[..., 0] = np.maximum(prefix[..., 0], prefix[..., 1] - np.maximum(left, 0))
    live = segment_ids > 0
    lo = _window_start(own, rows, window)
    return np.stack(
        [_stack_live(live, lo, rows + 1), _stack_live(live, prefix[..., 0], prefix[..., 1])], axis=2
    )


def check_intervals(intervals: HostOrDevice, num_keys: int) -> None:
    """Checks, on the host, that every range lies inside the keys and that no two overlap.

    Args:
      intervals: int32 [batch, time, n, 2].
      num_keys: rows of the trunk.

    Raises:
      ValueError: naming the first offending batch row, query row and numbers.
    """
    values = np.asarray(intervals)
    if values.ndim != 4 or values.shape[-1] != 2 or values.shape[2] < 1:
        raise ValueError(f"intervals have shape {values.shape}; expected [batch, time, n >= 1, 2]")
    if values.dtype != np.int32:
        raise ValueError(f"intervals are {values.dtype}; expected int32")
    lo, hi = values[..., 0], values[..., 1]
    live = lo < hi
    outside = np.argwhere(live & ((lo < 0) | (hi > num_keys)))
    if outside.size:
        b, t, r = outside[0]
        raise ValueError(
            f"range {r} of query ({b}, {t}) is [{lo[b, t, r]}, {hi[b, t, r]}), "
            f"outside the {num_keys} keys"
        )
    for r in range(values.shape[2]):
        for s in range(r):
            both = live[..., r] & live[..., s]
            meet = (lo[..., r] < hi[..., s]) & (lo[..., s] < hi[..., r])
            overlap = np.argwhere(both & meet)
            if overlap.size:
                b, t = overlap[0]
                raise ValueError(
                    f"ranges {s} and {r} of query ({b}, {t}) overlap: "
                    f"{values[b, t, s].tolist()} and {values[b, t, r].tolist()}"
                )


def to_mask(
    intervals: Int[HostOrDevice, "batch time n 2"], num_keys: int
) -> Bool[HostOrDevice, "batch time keys"]:
    """Expands intervals to the dense mask they stand for (True = visible)."""
    xp = _library(intervals)
    keys = xp.arange(num_keys, dtype=np.int32)
    inside = (keys >= intervals[..., :1]) & (keys < intervals[..., 1:])
    return inside.any(axis=2)


def check_arguments(
    q: HostOrDevice,
    k: HostOrDevice,
    v: HostOrDevice,
    intervals: HostOrDevice,
    branch_k: HostOrDevice | None,
    branch_v: HostOrDevice | None,
) -> None:
    """Checks the shapes that every implementation of `attend` relies on.

    Raises:
      ValueError: naming both shapes.
    """
    batch, time, q_heads, dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(f"keys {k.shape} and values {v.shape} do not fit queries {q.shape}")
    kv_heads = k.shape[2]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads")
    if intervals.shape[:2] != (batch, time) or intervals.shape[3:] != (2,):
        raise ValueError(f"intervals {intervals.shape} do not fit queries {q.shape}")
    if (branch_k is None) != (branch_v is None):
        raise ValueError("branch_k and branch_v are given together or not at all")
    if branch_k is not None:
        expected = (batch, time, branch_k.shape[2], kv_heads, dim)
        if branch_k.shape != expected or branch_v.shape != expected:
            raise ValueError(
                f"branch keys {branch_k.shape} and values {branch_v.shape} do not fit "
                f"queries {q.shape} and keys {k.shape}; expected {expected}"
            )
