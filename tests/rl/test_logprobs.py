"""Token log-probabilities against a dense float64 oracle, forwards and backwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import compat
from jaxspec.rl import logprobs as lib
from jaxspec.rl.logprobs import token_logprobs

ROWS, DIM, VOCAB = 24, 5, 13


def case(rows=ROWS, seed=0, keep=0.6):
    rng = np.random.default_rng(seed)
    return {
        "hidden": rng.normal(size=(rows, DIM)),
        "head": rng.normal(size=(VOCAB, DIM)),
        "labels": rng.integers(0, VOCAB, rows),
        "mask": rng.random(rows) < keep,
        "grad": rng.normal(size=rows),
    }


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def oracle(data, temperature=1.0):
    """Dense float64: three outputs, and the gradients of sum(grad * logprobs)."""
    hidden, head, labels = data["hidden"], data["head"], data["labels"]
    mask = data["mask"].astype(float)
    raw = hidden @ head.T
    logp = log_softmax(raw / temperature)
    probs = np.exp(logp)
    normaliser = np.log(np.exp(raw).sum(-1))
    entropy = -(probs * logp).sum(-1)
    d_logits = (np.eye(VOCAB)[labels] - probs) * (data["grad"] * mask)[:, None] / temperature
    outputs = (logp[np.arange(len(labels)), labels] * mask, normaliser * mask, entropy * mask)
    return outputs, (d_logits @ head, d_logits.T @ hidden)


def arrays(data, dtype=jnp.float32):
    cast = {name: jnp.asarray(data[name], dtype) for name in ("hidden", "head", "grad")}
    return cast | {
        "labels": jnp.asarray(data["labels"], jnp.int32),
        "mask": jnp.asarray(data["mask"]),
    }


@functools.partial(jax.jit, static_argnames=("chunk", "temperature", "compute_dtype"))
def compiled(hidden, head, labels, mask, grad, **settings):
    def scalar(hidden, head):
        out = token_logprobs(hidden, head, labels, mask, **settings)
        return jnp.sum(out.logprobs * grad), out

    grads, out = jax.grad(scalar, (0, 1), has_aux=True)(hidden, head)
    return (out.logprobs, out.log_normaliser, out.entropy), grads


def outputs_and_grads(data, **settings):
    return compiled(**arrays(data), **settings)


def check(data, atol=2e-5, **settings):
    want = oracle(data, settings.get("temperature", 1.0))
    got = outputs_and_grads(data, **settings)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize("chunk, temperature", [(5, 1.0), (64, 0.7)])
def test_dense_oracle(chunk, temperature):
    check(case(), chunk=chunk, temperature=temperature)


def test_bfloat16_products_accumulate_in_float32():
    check(case(), chunk=7, compute_dtype="bfloat16", atol=0.05)


def test_float64():
    with jax.enable_x64(True):
        data = case()
        a = arrays(data, jnp.float64)
        hidden, *rest = a["hidden"], a["head"], a["labels"], a["mask"]
        out = jax.jit(lambda h: token_logprobs(h, *rest, chunk=7, compute_dtype="float64"))(hidden)
        assert out.logprobs.dtype == jnp.float64
        np.testing.assert_allclose(out.logprobs, oracle(data)[0][0], atol=1e-13)


def test_last_chunk_left_out_is_seen(monkeypatch):
    plan = lib._plan
    fault = lambda mask, chunk: (*plan(mask, chunk)[:2], plan(mask, chunk)[2] - 1)  # noqa: E731
    monkeypatch.setattr(lib, "_plan", fault)
    with pytest.raises(AssertionError):
        check(case(), chunk=6)  # no other test compiles this chunk


def test_masked_rows_hold_anything_and_give_exact_zeros():
    data = case()
    off = ~data["mask"]
    clean = outputs_and_grads(data, chunk=5)
    data["hidden"][off] = np.nan
    data["labels"][off] = -100
    dirty = outputs_and_grads(data, chunk=5)
    for ours, theirs in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for row_array in (*dirty[0], dirty[1][0]):
        assert not np.asarray(row_array)[off].any()


@pytest.mark.parametrize("keep, chunks", [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3)])
def test_only_rows_in_the_mask_are_computed(keep, chunks):
    mask = np.zeros(12, bool)
    mask[np.random.default_rng(1).permutation(12)[:keep]] = True
    order, count, run = lib._plan(jnp.asarray(mask), 4)
    assert (int(count), int(run)) == (keep, chunks)
    assert sorted(np.asarray(order)[:keep]) == list(np.flatnonzero(mask))


def test_nothing_in_the_mask():
    data = case(keep=0.0)
    for array in jax.tree.leaves(outputs_and_grads(data, chunk=5)):
        assert not np.asarray(array).any()
    empty = case(rows=0)
    assert outputs_and_grads(empty)[0][0].shape == (0,)


def test_normaliser_and_entropy_have_no_gradient():
    a = arrays(case())

    def scalar(hidden):
        out = token_logprobs(hidden, a["head"], a["labels"], a["mask"])
        return out.log_normaliser.sum() + out.entropy.sum()

    assert not np.asarray(jax.jit(jax.grad(scalar))(a["hidden"])).any()


@pytest.mark.parametrize("vary_head", [False, True])
def test_sharded_rows_inside_a_scan(vary_head):
    """Rows over 4 devices and 2 microbatches in a scan; the head is whole everywhere."""
    data = case(keep=0.4)
    data["mask"][:9] = False  # a device without any row to compute
    a = arrays(data)
    mesh = compat.make_mesh((4,), ("data",), jax.devices()[:4])

    def local_grads(hidden, head, labels, mask, grad):
        if vary_head:
            head = compat.vary(head, ("data",))

        def micro(total, xs):
            h, *rest, g = xs

            def loss(h, w):
                return jnp.sum(token_logprobs(h, w, *rest, chunk=2).logprobs * g)

            d_hidden, d_head = jax.grad(loss, (0, 1))(h, head)
            return total + d_head, d_hidden

        halves = [x.reshape(2, -1, *x.shape[1:]) for x in (hidden, labels, mask, grad)]
        total, d_hidden = jax.lax.scan(micro, jnp.zeros_like(head), halves)
        total = jax.lax.psum(total, "data") if vary_head else total
        return d_hidden.reshape(hidden.shape), total

    row = P("data")
    step = jax.shard_map(
        local_grads,
        mesh=mesh,
        in_specs=(row, P(), row, row, row),
        out_specs=(row, P()),
        check_vma=True,
    )
    got = jax.jit(step)(a["hidden"], a["head"], a["labels"], a["mask"], a["grad"])
    for ours, theirs in zip(got, oracle(data)[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_memory_grows_with_the_chunk_and_not_with_the_rows():
    vocab, dim = 131072, 4

    def temporaries(rows, chunk):
        def loss(hidden, head, labels, mask):
            return token_logprobs(hidden, head, labels, mask, chunk=chunk).logprobs.sum()

        shapes = [((rows, dim), "float32"), ((vocab, dim), "float32"), ((rows,), "int32")]
        args = [jax.ShapeDtypeStruct(*shape) for shape in [*shapes, ((rows,), "bool")]]
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*args)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one = temporaries(8192, 64)
    assert temporaries(4096, 64) > 0.95 * one
    assert temporaries(8192, 128) > 1.4 * one
    assert one < 4 * 64 * vocab * 4


def test_sampler_and_trainer_at_two_temperatures():
    """Logits (2, 1, 0): temperature 2 for one side only would look like a ratio of 1.313."""
    hidden, head = jnp.ones((1, 1)), jnp.asarray([[2.0], [1.0], [0.0]])
    labels, mask = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    both = [functools.partial(token_logprobs, temperature=t) for t in (1.0, 2.0)]
    plain, warm = jax.jit(lambda *args: [f(*args) for f in both])(hidden, head, labels, mask)
    plain = plain.logprobs[0]
    np.testing.assert_allclose([plain, warm.logprobs[0]], [-0.4076, -0.6803], atol=5e-5)
    np.testing.assert_allclose(np.exp(plain - warm.logprobs[0]), 1.313, atol=5e-4)
    np.testing.assert_allclose(warm.log_normaliser[0], 2.4076, atol=5e-5)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"chunk": 0}, "chunk is 0 rows"),
    ],
)
def test_settings_out_of_range(settings, message):
    a = arrays(case())
    with pytest.raises(ValueError, match=message):
        token_logprobs(a["hidden"], a["head"], a["labels"], a["mask"], **settings)
