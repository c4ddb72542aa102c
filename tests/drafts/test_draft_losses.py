"""Row losses and their chunked sum against plain formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts import losses

PASSES, ROWS, DIM, VOCAB, PART = 2, 11, 6, 17, 9


def textbook(student, teacher, normaliser, objective):
    """One row in the plainest words, for automatic differentiation in float64."""
    q = jnp.exp(student) / jnp.exp(student).sum()
    p = jnp.exp(teacher) / jnp.exp(teacher).sum()
    full = p if normaliser is None else jnp.exp(teacher - normaliser)
    accepted = jnp.minimum(full, q).sum()
    cross = -(p * jnp.log(q)).sum()
    weight = jax.lax.stop_gradient(jnp.exp(-3 * accepted))
    loss = {
        "cross_entropy": cross,
        "tv": 1 - accepted,
        "lk": -jnp.log(accepted),
        "lk_hybrid": weight * cross + (1 - weight) * (1 - accepted),
    }[objective]
    return loss, accepted


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


def dense(objective, with_normaliser):
    """Numerator, its gradients and the statistics over whole arrays, in float64."""
    with jax.enable_x64(True):
        x = {k: jnp.asarray(v, jnp.float64) for k, v in problem().items()}

        def numerator(student, lm_head):
            one = functools.partial(textbook, objective=objective)
            normaliser = x["log_normaliser"] if with_normaliser else None
            axes = (0, 0, 0 if with_normaliser else None)
            row = jax.vmap(one, in_axes=axes)
            both = jax.vmap(lambda s: row(s, x["teacher_hidden"] @ x["teacher_head"].T, normaliser))
            loss, accepted = both(student @ lm_head.T)
            return (x["weights"] * loss).sum(), (loss, accepted)

        f = jax.value_and_grad(numerator, argnums=(0, 1), has_aux=True)
        out = jax.jit(f)(x["student"], x["lm_head"])
        return jax.tree.map(np.asarray, out)


def chunked(objective, with_normaliser, chunk, replace=()):
    x = {k: jnp.asarray(v, jnp.float32) for k, v in (problem() | dict(replace)).items()}
    if not with_normaliser:
        x["log_normaliser"] = None

    def numerator(student, lm_head):
        return losses.distill_rows(
            **(x | {"student": student, "lm_head": lm_head}), objective=objective, chunk=chunk
        )

    f = jax.value_and_grad(numerator, argnums=(0, 1), has_aux=True)
    return jax.jit(f)(x["student"], x["lm_head"])


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
    (want, (loss, accepted)), want_grads = dense(objective, with_normaliser)
    (got, stats), grads = chunked(objective, with_normaliser, chunk)
    live = problem()["weights"] > 0
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(stats.loss, np.where(live, loss, 0), atol=2e-6)
    np.testing.assert_allclose(stats.acceptance, np.where(live, accepted, 0), atol=1e-6)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)
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
    (got, stats), grads = chunked("cross_entropy", True, 4, poison.items())
    assert got == want
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(stats.loss)[:, dead].any()
    assert not np.asarray(grads[0])[:, dead].any()


def test_no_weight_at_all_is_zero():
    (got, stats), grads = chunked("lk", True, 4, {"weights": np.zeros((PASSES, ROWS))}.items())
    assert all(not np.asarray(x).any() for x in jax.tree.leaves((got, stats, grads)))


@pytest.mark.parametrize("objective", losses.OBJECTIVES)
def test_losses_hold_at_extreme_logits(objective):
    """Large, nearly equal bf16 logits; distributions that share nothing; equal ones."""
    rows = jnp.asarray([[80.0, 79.9, -1e4, 0.0], [1e4, 0.0, 0.0, 0.0]], jnp.bfloat16)
    far = jnp.asarray([[0.0, 0.0, 0.0, 200.0], [0.0, 1e4, 0.0, 0.0]], jnp.bfloat16)
    for student, teacher in ((rows, rows), (rows, far)):
        stats, grad = losses.row_losses(student, teacher, None, objective)
        assert stats.loss.dtype == grad.dtype == jnp.float32
        assert np.isfinite(grad).all() and np.isfinite(stats.loss).all()
        assert (np.asarray(stats.loss) >= 0).all()
        if objective in ("tv", "lk") and student is teacher:
            assert not np.asarray(stats.loss).any() and not np.asarray(grad).any()
        if objective == "lk" and student is not teacher:
            # -log of an acceptance of exp(-200) and less is still a number with a gradient.
            assert stats.loss[0] > 79 and stats.loss[1] > 9900
            assert np.abs(grad).max() > 0.5


def test_gradient_reaches_neither_teacher_nor_weights():
    x = {k: jnp.asarray(v, jnp.float32) for k, v in problem().items()}
    names = ("teacher_hidden", "teacher_head", "log_normaliser", "weights")

    def numerator(*values):
        merged = x | dict(zip(names, values, strict=True))
        return losses.distill_rows(**merged, objective="tv")[0]

    grads = jax.grad(numerator, argnums=(0, 1, 2, 3))(*[x[n] for n in names])
    assert all(not np.asarray(g).any() for g in grads)


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
