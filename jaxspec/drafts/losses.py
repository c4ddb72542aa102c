"""Distillation losses of a draft against its policy, row by row and in chunks of rows.

With p the policy's distribution and q the draft's, the chance that a token drawn from q is accepted
is sum_v min(p_v, q_v) = 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, equation 3 and theorem
3.5). The cross-entropy has the gradient of the forward divergence; the others aim at acceptance
itself.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import compat

OBJECTIVES = ("cross_entropy", "tv", "lk", "lk_hybrid")
# lk_hybrid leans on the cross-entropy while little is accepted: its weight is exp(-3 acceptance).
HYBRID_DECAY = 3.0


@flax.struct.dataclass
class RowStats:
    """What a row's distributions say, without gradients; zero where a row has no weight.

    Attributes:
      loss: the objective, unweighted.
      acceptance: sum over the draft's vocabulary of min(p_v, q_v).
      top1: 1 where policy and draft rate the same token of the draft's vocabulary highest.
    """

    loss: Any
    acceptance: Any
    top1: Any


def row_losses(
    student: Float[Array, "*rows vocab"],
    teacher: Float[Array, "*#rows vocab"],
    log_normaliser: Float[Array, "*#rows"] | None,
    objective: str,
) -> tuple[RowStats, Float[Array, "*rows vocab"]]:
    """Returns every row's statistics and the gradient of its loss in the student's logits.

    Objectives: "cross_entropy", -sum_v p_v log q_v with p renormalised over the draft's vocabulary;
    "tv", 1 - a with a = sum_v min(p_v, q_v); "lk", -log a; "lk_hybrid", w * cross_entropy +
    (1 - w) (1 - a) with w = exp(-3 a) held constant. In a, p is the policy's probability in its
    whole vocabulary when `log_normaliser` is given, and the renormalised one otherwise.

    Args:
      student: the draft's logits over its vocabulary.
      teacher: the policy's raw logits of the same tokens.
      log_normaliser: log-sum-exp of the policy's raw logits over its whole vocabulary.
      objective: one of OBJECTIVES.

    Raises:
      ValueError: for an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; known are {OBJECTIVES}")
    wide = jnp.promote_types(student.dtype, jnp.float32)
    student, teacher = student.astype(wide), teacher.astype(wide)
    log_q = jax.nn.log_softmax(student, axis=-1)
    log_p_draft = jax.nn.log_softmax(teacher, axis=-1)
    log_p = log_p_draft if log_normaliser is None else teacher - log_normaliser[..., None]
    q, p = jnp.exp(log_q), jnp.exp(log_p)

    acceptance = jnp.minimum(jnp.sum(jnp.minimum(p, q), axis=-1), 1.0)
    if objective in ("cross_entropy", "lk_hybrid"):
        p_draft = jnp.exp(log_p_draft)
        # A probability of exactly 0 leaves out its term even where log q is -inf.
        entropy = -jnp.sum(jnp.where(p_draft > 0, p_draft * log_q, 0.0), axis=-1)
        entropy_grad = q - p_draft
    if objective in ("tv", "lk_hybrid"):
        # sum_v q_v = 1, so 1 - a = sum_v max(q_v - p_v, 0): no cancellation, 0 where q = p.
        over = q > p
        distance = jnp.sum(jnp.where(over, q - p, 0.0), axis=-1)
        excess = jnp.where(over, q, 0.0)
        distance_grad = excess - q * jnp.sum(excess, axis=-1, keepdims=True)

    if objective == "cross_entropy":
        loss, grad = entropy, entropy_grad
    elif objective == "tv":
        loss, grad = distance, distance_grad
    elif objective == "lk":
        # In logarithms throughout, so that it holds where acceptance underflows.
        log_common = jnp.minimum(log_p, log_q)
        log_acceptance = jax.nn.logsumexp(log_common, axis=-1)
        share = jnp.exp(log_common - log_acceptance[..., None])
        under = jnp.where(log_q < log_p, share, 0.0)
        loss = jnp.maximum(-log_acceptance, 0.0)
        grad = q * jnp.sum(under, axis=-1, keepdims=True) - under
    else:
        weight = jnp.exp(-HYBRID_DECAY * acceptance)
        loss = weight * entropy + (1 - weight) * distance
        grad = weight[..., None] * entropy_grad + (1 - weight[..., None]) * distance_grad
    agree = jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1)
    stats = RowStats(loss=loss, acceptance=acceptance, top1=agree.astype(wide))
    return stats, grad


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    objective: str
    compute_dtype: str
    chunk: int


def distill_rows(
    student: Float[Array, "passes rows dim"],
    lm_head: Float[Array, "draft_vocab dim"],
    teacher_hidden: Float[Array, "rows dim"],
    teacher_head: Float[Array, "draft_vocab dim"],
    log_normaliser: Float[Array, " rows"] | None,
    weights: Float[Array, "passes rows"],
    *,
    objective: str,
    compute_dtype: str = "float32",
    chunk: int = 256,
) -> tuple[Float[Array, ""], RowStats]:
    """Returns the weighted sum of row losses, without an array of rows by vocabulary.

    Rows that have a weight in some pass are gathered into chunks, and no other row costs a matrix
    product. A chunk's teacher logits serve all passes. The gradients with respect to `student` and
    `lm_head` are formed along with the loss, while the chunk's logits are there, and the backward
    pass only scales them; nothing else receives one.

    Args:
      student: the draft's hidden states after its last norm, each at its teacher's row.
      lm_head: the draft's head.
      teacher_hidden: the policy's hidden states after its final norm.
      teacher_head: the policy's head, at the draft's vocabulary.
      log_normaliser: log-sum-exp of the policy's raw logits over its whole vocabulary.
      weights: weight of each row's loss, not negative; 0 leaves the row out whatever it holds.
      objective: one of OBJECTIVES.
      compute_dtype: dtype of the matrix products' inputs; the losses are at least float32.
      chunk: rows whose logits (of every pass) exist at one time.

    Returns:
      The numerator, and statistics [passes, rows] without gradients.

    Raises:
      ValueError: for an unknown objective or a chunk below 1.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; known are {OBJECTIVES}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    operands = student, lm_head, teacher_hidden, teacher_head, log_normaliser, weights
    # A cotangent must vary over the mesh axes of its primal; marking the operands first makes the
    # transpose of the mark reduce the gradients of replicated ones.
    axes = sorted(frozenset().union(*map(compat.varying_axes, jax.tree.leaves(operands))))
    static = _Static(objective=objective, compute_dtype=compute_dtype, chunk=chunk)
    return _distill(static, *compat.vary(operands, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distill(static, student, lm_head, teacher_hidden, teacher_head, log_normaliser, weights):
    operands = student, lm_head, teacher_hidden, teacher_head, log_normaliser, weights
    return _run(static, *operands, with_grads=False)[:2]


def _distill_forward(static, *operands):
    numerator, stats, grads = _run(static, *operands, with_grads=True)
    return (numerator, stats), grads


def _distill_backward(static, grads, cotangents):
    scale, _ = cotangents
    d_student, d_head = ((scale * g).astype(g.dtype) for g in grads)
    return d_student, d_head, None, None, None, None


_distill.defvjp(_distill_forward, _distill_backward)


def _run(
    static, student, lm_head, teacher_hidden, teacher_head, log_normaliser, weights, *, with_grads
):
    """Returns numerator, statistics and (gradients of student and lm_head, or None)."""
    passes, rows, _ = student.shape
    dtype, chunk = static.compute_dtype, min(static.chunk, rows)
    wide = jnp.promote_types(dtype, jnp.float32)
    axes = sorted(compat.varying_axes(student))
    dot = functools.partial(jnp.einsum, preferred_element_type=wide)
    head, teacher_head = lm_head.astype(dtype), teacher_head.astype(dtype)

    # Weighted rows first, in order; places past the end drop on the way out.
    used = jnp.any(weights > 0, axis=0)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    past = rows + jnp.arange(-rows % chunk, dtype=jnp.int32)
    order = jnp.concatenate([order, compat.vary(past, axes)])
    chunks = (jnp.sum(used) + chunk - 1) // chunk

    def one_chunk(c, carry):
        stats, grads = carry
        at = jax.lax.dynamic_slice(order, (c * chunk,), (chunk,))
        pick = functools.partial(jnp.take, indices=at, mode="fill", fill_value=0)
        weight = pick(weights, axis=1)
        live = weight > 0
        # Whatever a row without weight holds, 0 * nan included, stays out of every sum.
        h = jnp.where(live[..., None], pick(student, axis=1), 0).astype(dtype)
        t = jnp.where(live.any(0)[:, None], pick(teacher_hidden, axis=0), 0).astype(dtype)
        normaliser = None
        if log_normaliser is not None:
            normaliser = jnp.where(live.any(0), pick(log_normaliser, axis=0), 0)
        logits, teacher = dot("kcd,vd->kcv", h, head), dot("cd,vd->cv", t, teacher_head)
        found, grad = row_losses(
            logits,
            teacher[None],
            None if normaliser is None else normaliser[None],
            static.objective,
        )
        place = {"mode": "drop", "unique_indices": True}
        stats = jax.tree.map(
            lambda all_rows, x: all_rows.at[:, at].set(jnp.where(live, x, 0), **place), stats, found
        )
        if with_grads:
            d_student, d_head = grads
            grad = (grad * weight[..., None]).astype(dtype)
            d_student = d_student.at[:, at].set(dot("kcv,vd->kcd", grad, head), **place)
            grads = d_student, d_head + dot("kcv,kcd->vd", grad, h)
        return stats, grads

    blank = jnp.zeros((passes, rows), wide)
    carry = RowStats(loss=blank, acceptance=blank, top1=blank), None
    if with_grads:
        carry = carry[0], (jnp.zeros(student.shape, wide), jnp.zeros(lm_head.shape, wide))
    stats, grads = jax.lax.fori_loop(0, chunks, one_chunk, compat.vary(carry, axes))
    numerator = jnp.sum(jnp.where(weights > 0, weights * stats.loss, 0))
    if with_grads:
        grads = grads[0].astype(student.dtype), grads[1].astype(lm_head.dtype)
    return numerator, stats, grads
