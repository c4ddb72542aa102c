"""Row losses and their chunked sum against plain formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts import losses

PASSES, ROWS, DIM, VOCAB, PART = 2, 11, 6, 17, 9


def textbook(student, teacher, normaliser):
    """One row's four losses in the plainest words, for automatic differentiation in float64."""
    q = jnp.exp(student) / jnp.exp(student).sum()
    p = jnp.exp(teacher) / jnp.exp(teacher).sum()
    full = p if normaliser is None else jnp.exp(teacher - normaliser)
    accepted = jnp.minimum(full, q).sum()
    cross = -(p * jnp.log(q)).sum()
    weight = jax.lax.stop_gradient(jnp.exp(-3 * accepted))
    hybrid = weight * cross + (1 - weight) * (1 - accepted)
    return jnp.stack([cross, 1 - accepted, -jnp.log(accepted), hybrid]), accepted


@functools.cache
def problem():
    r = np.random.default_rng(0)
    weights = r.uniform(0.5, 1.5, (PASSES, ROWS)) * (r.uniform(size=(PASSES, ROWS)) < 0.6)
    weights[:, [0, 4, 5]] = 0
    head = r.normal(size=(VOCAB, DIM))
    ids = np.sort(r.choice(VOCAB, PART, replace=False))
    hidden = r.normal(size=(ROWS, DIM))
    return {
        "student": r.normal(size=(PASSES, ROWS, DIM)),
        "lm_head": r.normal(size=(PART, DIM)),
        "teacher_hidden": hidden,
        "teacher_head": head[ids],
        "log_normaliser": np.log(np.exp(hidden @ head.T).sum(-1)),
        "weights": weights,
    }


@functools.cache
def dense(with_normaliser):
    """Numerators, their gradients and the statistics over whole arrays, in float64."""
    with jax.enable_x64(True):
        x = {k: jnp.asarray(v, jnp.float64) for k, v in problem().items()}

        def numerators(student, lm_head):
            normaliser = x["log_normaliser"] if with_normaliser else None
            row = jax.vmap(textbook, in_axes=(0, 0, 0 if with_normaliser else None))
            both = jax.vmap(lambda s: row(s, x["teacher_hidden"] @ x["teacher_head"].T, normaliser))
            loss, accepted = both(student @ lm_head.T)
            return (x["weights"][..., None] * loss).sum((0, 1)), (loss, accepted)

        f = jax.jacrev(numerators, argnums=(0, 1), has_aux=True)
        return jax.tree.map(np.asarray, jax.jit(f)(x["student"], x["lm_head"]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def chunked_with_gradients(objective, chunk, operands):
    def numerator(operands):
        return losses.distill_rows(**operands, objective=objective, chunk=chunk)

    return jax.value_and_grad(numerator, has_aux=True)(operands)


def chunked(objective, with_normaliser, chunk, **replace):
    """(numerator, statistics), and the gradient of every operand."""
    x = {k: jnp.asarray(v, jnp.float32) for k, v in (problem() | replace).items()}
    if not with_normaliser:
        x["log_normaliser"] = None
    return chunked_with_gradients(objective, chunk, x)


@pytest.mark.parametrize(
    ("objective", "with_normaliser", "chunk"),
    [
        ("cross_entropy", True, 4),
        ("tv", True, 3),
        ("lk", True, 256),
        ("lk", False, 1),
        ("lk_hybrid", True, 4),
    ],
)
def test_numerator_statistics_and_gradients_equal_the_textbook(objective, with_normaliser, chunk):
    want_grads, (loss, accepted) = dense(with_normaliser)
    which = losses.OBJECTIVES.index(objective)
    (got, stats), grads = chunked(objective, with_normaliser, chunk)
    live = problem()["weights"] > 0
    loss = np.where(live, loss[..., which], 0)
    np.testing.assert_allclose(got, (problem()["weights"] * loss).sum(), rtol=1e-6)
    np.testing.assert_allclose(stats.loss, loss, atol=2e-6)
    np.testing.assert_allclose(stats.acceptance, np.where(live, accepted, 0), atol=1e-6)
    for name, want in zip(("student", "lm_head"), want_grads, strict=True):
        np.testing.assert_allclose(grads.pop(name), want[which], atol=5e-6)
    # Nothing of the teacher's, nor the weights, receives a gradient.
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))
    logits = problem()["student"] @ problem()["lm_head"].T
    teacher = problem()["teacher_hidden"] @ problem()["teacher_head"].T
    agree = logits.argmax(-1) == teacher.argmax(-1)
    np.testing.assert_array_equal(stats.top1, agree & live)


def test_rows_without_weight_are_left_out_whatever_they_hold():
    (want, _), want_grads = chunked("cross_entropy", True, 4)
    dead = (problem()["weights"] == 0).all(0)
    hidden, normaliser = problem()["teacher_hidden"].copy(), problem()["log_normaliser"].copy()
    hidden[dead], normaliser[dead] = np.nan, np.inf
    student = np.where(problem()["weights"][..., None] == 0, np.nan, problem()["student"])
    poison = {"teacher_hidden": hidden, "log_normaliser": normaliser, "student": student}
    (got, stats), grads = chunked("cross_entropy", True, 4, **poison)
    assert got == want
    for name in ("student", "lm_head"):
        np.testing.assert_array_equal(grads[name], want_grads[name])
    assert not np.asarray(stats.loss)[:, dead].any()
    assert not np.asarray(grads["student"])[:, dead].any()


def test_no_weight_at_all_is_zero():
    out = chunked("cross_entropy", True, 4, weights=np.zeros((PASSES, ROWS)))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(out))


@pytest.mark.parametrize("objective", losses.OBJECTIVES)
def test_losses_hold_at_extreme_logits(objective):
    """Large, nearly equal bf16 logits; distributions that share nothing; equal ones."""
    rows = jnp.asarray([[80.0, 79.9, -1e4, 0.0], [1e4, 0.0, 0.0, 0.0]], jnp.bfloat16)
    far = jnp.asarray([[0.0, 0.0, 0.0, 200.0], [0.0, 1e4, 0.0, 0.0]], jnp.bfloat16)
    row_losses = jax.jit(functools.partial(losses.row_losses, objective=objective))
    for student, teacher in ((rows, rows), (rows, far)):
        stats, grad = row_losses(student, teacher, None)
        assert stats.loss.dtype == grad.dtype == jnp.float32
        assert np.isfinite(grad).all() and np.isfinite(stats.loss).all()
        assert (np.asarray(stats.loss) >= 0).all()
        if objective in ("tv", "lk") and student is teacher:
            assert not np.asarray(stats.loss).any() and not np.asarray(grad).any()
        if objective == "lk" and student is not teacher:
            # -log of an acceptance of exp(-200) and less is still a number with a gradient.
            assert stats.loss[0] > 79 and stats.loss[1] > 9900
            assert np.abs(grad).max() > 0.5


def test_memory_grows_with_the_chunk_and_not_with_rows_times_vocabulary():
    passes, dim, vocab = 3, 8, 16384

    def temporary(rows, chunk):
        shapes = (passes, rows, dim), (vocab, dim), (rows, dim), (vocab, dim), (rows,)
        f = functools.partial(losses.distill_rows, objective="cross_entropy", chunk=chunk)
        grad = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (*shapes, (passes, rows))]
        return jax.jit(grad).lower(*args).compile().memory_analysis().temp_size_in_bytes

    small, more_rows, more_chunk = temporary(256, 32), temporary(4096, 32), temporary(4096, 128)
    logits_of_a_chunk = passes * 32 * vocab * 4
    assert more_rows - small < 0.1 * (4096 - 256) * vocab * 4
    assert more_rows < 8 * logits_of_a_chunk
    assert more_chunk > more_rows + 2 * logits_of_a_chunk


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="'kl'"):
        chunked("kl", True, 4)
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked("tv", True, 0)
    with pytest.raises(ValueError, match="'kl'"):
        losses.row_losses(jnp.zeros((1, 2)), jnp.zeros((1, 2)), None, "kl")
