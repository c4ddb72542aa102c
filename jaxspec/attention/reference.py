"""Dense attention over a trunk and a private branch: the oracle, quadratic in time and memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.attention.spec import MASKED, check_arguments, to_mask


def attend(
    q: Float[Array, "batch time q_heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    intervals: Int[Array, "batch time n 2"],
    *,
    branch_k: Float[Array, "batch time p kv_heads dim"] | None = None,
    branch_v: Float[Array, "batch time p kv_heads dim"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "batch time q_heads dim"], Float[Array, "batch time q_heads"]]:
    """Attends from every query row to its intervals of the trunk and to its own branch.

    One softmax runs over both sets. Query head h uses key/value head h // (q_heads // kv_heads).

    Args:
      q: queries.
      k: trunk keys.
      v: trunk values.
      intervals: disjoint half-open ranges of trunk rows that each query row sees.
      branch_k: p further keys that only their own query row sees; always visible to it.
      branch_v: the branch's values.
      scale: factor of the scores; 1 / sqrt(dim) when None.

    Returns:
      out, in q's dtype, zero for a row that sees nothing; and the natural log-sum-exp of the
      scaled scores, float32 (float64 for float64 inputs), -1e30 for a row that sees nothing.

    Raises:
      ValueError: if shapes do not fit each other.
    """
    check_arguments(q, k, v, intervals, branch_k, branch_v)
    batch, time, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scale = dim**-0.5 if scale is None else scale
    grouped = q.astype(wide).reshape(batch, time, kv_heads, q_heads // kv_heads, dim)

    scores = jnp.einsum("bthgd,bshd->bthgs", grouped, k.astype(wide)) * scale
    visible = to_mask(intervals, k.shape[1])[:, :, None, None]
    if branch_k is not None:
        own = jnp.einsum("bthgd,btphd->bthgp", grouped, branch_k.astype(wide)) * scale
        scores = jnp.concatenate([scores, own], axis=-1)
        always = jnp.ones((*visible.shape[:-1], own.shape[-1]), bool)
        visible = jnp.concatenate([visible, always], axis=-1)

    scores = jnp.where(visible, scores, MASKED)
    empty = ~visible.any(axis=-1)
    top = jax.lax.stop_gradient(jnp.where(empty, 0.0, scores.max(axis=-1)))
    weights = jnp.exp(scores - top[..., None])
    total = jnp.where(empty, 1.0, weights.sum(axis=-1))
    probs = weights / total[..., None]
    out = jnp.einsum("bthgs,bshd->bthgd", probs[..., : k.shape[1]], v.astype(wide))
    if branch_v is not None:
        out += jnp.einsum("bthgp,btphd->bthgd", probs[..., k.shape[1] :], branch_v.astype(wide))
    lse = jnp.where(empty, MASKED, top + jnp.log(total))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, time, q_heads)
