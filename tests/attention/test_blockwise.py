"""The tiled attention is the dense one: values, every gradient, every kind of visibility."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

from jaxspec import compat
from jaxspec.attention import blockwise, reference, spec

NAMES = ("out", "lse", "q", "k", "v", "branch_k", "branch_v")
TILES = {"query_tile": 16, "key_tile": 8, "rows_at_once": 32}


def packed(batch, time, lengths, window=None):
    """Intervals of documents packed in order; what they leave of the row is padding."""
    segments, positions = np.zeros((2, batch, time), np.int32)
    start = 0
    for i, length in enumerate(lengths):
        segments[:, start : start + length] = i + 1
        positions[:, start : start + length] = np.arange(length)
        start += length
    return spec.causal_intervals(segments, positions, window=window)


def shared(batch, time):
    """Two prefixes in one row, the second after its continuation; n = 2 and some padding."""
    segments = np.repeat([1, 2, 3, 5, 4, 0], [11, 7, time - 35, 6, 8, 3])
    prefixes = np.select([np.isin(segments, (2, 3)), segments == 5], [1, 4])
    tile = functools.partial(np.broadcast_to, shape=(batch, time))
    return spec.shared_prefix_intervals(tile(segments), tile(prefixes))


def operands(batch, time, heads, dim=8, p=0, keys=None, dtype=np.float64):
    """Returns (q, k, v, branch_k, branch_v) and cotangents of out and lse."""
    rng = np.random.default_rng(time + p)
    q_heads, kv_heads = heads
    trunk, branch = (batch, keys or time, kv_heads, dim), (batch, time, p, kv_heads, dim)
    shapes = [(batch, time, q_heads, dim), trunk, trunk, branch, branch]
    draw = [rng.normal(size=s).astype(dtype) for s in [*shapes, shapes[0], shapes[0][:3]]]
    return tuple(draw[:5]), tuple(draw[5:])


def with_gradients(attend, intervals):
    """Returns a compiled (args, cotangents) -> {name: out, lse and all five gradients}."""

    @jax.jit
    def run(args, cotangents):
        def call(q, k, v, branch_k, branch_v):
            return attend(q, k, v, intervals, branch_k=branch_k, branch_v=branch_v)

        (out, lse), pull = jax.vjp(call, *args)
        return dict(zip(NAMES, (out, lse, *pull(cotangents)), strict=True))

    return lambda *operands: jax.device_get(run(*operands))


def assert_same(got, expected):
    for name in NAMES:
        value = expected[name]
        assert got[name].dtype == value.dtype, name
        np.testing.assert_allclose(got[name], value, 1e-12, 1e-12, err_msg=name)


def assert_equal_to_oracle(args, cotangents, intervals, **tiles):
    intervals = jnp.asarray(intervals)
    tiled = functools.partial(blockwise.attend, **tiles)
    got = with_gradients(tiled, intervals)(args, cotangents)
    assert_same(got, with_gradients(reference.attend, intervals)(args, cotangents))
    return got


CASES = {
    "documents, padding, uneven, 9/3 heads": (2, 37, (9, 3), 0, lambda b, t: packed(b, t, (20, 9))),
    "shared prefixes, branch of 3, 4/1": (1, 50, (4, 1), 3, shared),
    "window, branch of 1, 4/4, many short documents": (
        *(1, 45, (4, 4), 1),
        lambda b, t: packed(b, t, (1, 2) * 10 + (13,), window=5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_dense_oracle(case):
    batch, time, heads, p, build = CASES[case]
    intervals = build(batch, time)
    spec.check_intervals(intervals, time)
    with jax.enable_x64(True):
        got = assert_equal_to_oracle(*operands(batch, time, heads, p=p), intervals, **TILES)
    assert got["lse"].dtype == np.float64
    if p == 0:
        empty = ~spec.to_mask(intervals, time).any(-1)
        assert (got["out"][empty] == 0).all() and (got["lse"][empty] == spec.MASKED).all()
        assert (got["q"][empty] == 0).all()


@pytest.mark.parametrize("time", [127, 128, 129, 130])
def test_lengths_around_the_default_tile(time):
    with jax.enable_x64(True):
        args, cotangents = operands(1, time, (2, 1), dim=4)
        intervals = jnp.asarray(packed(1, time, (100, time - 100)))
        if time == 129:
            assert_equal_to_oracle(args, cotangents, intervals)
        for got, expected in zip(
            jax.jit(blockwise.attend)(*args[:3], intervals),
            jax.jit(reference.attend)(*args[:3], intervals),
            strict=True,
        ):
            np.testing.assert_allclose(got, expected, 1e-12, 1e-12)


def test_keys_need_not_be_the_query_rows():
    """A query chunk over a longer trunk, in an order that is not the natural one."""
    starts = np.array([5, 60, 0, 33, 12])
    intervals = np.stack([starts, starts + [9, 12, 40, 0, 1]], -1)[None, :, None].astype(np.int32)
    with jax.enable_x64(True):
        assert_equal_to_oracle(*operands(1, 5, (2, 1), keys=72), intervals, **TILES)


def test_derivatives_equal_finite_differences():
    """Trunk and branch jointly, the log-sum-exp's own gradient included."""
    with jax.enable_x64(True):
        args, _ = operands(1, 6, (2, 1), dim=3, p=2)
        intervals = jnp.asarray(packed(1, 6, (4, 2)))

        def call(q, k, v, branch_k, branch_v):
            return blockwise.attend(q, k, v, intervals, branch_k=branch_k, branch_v=branch_v)

        args = tuple(map(jnp.asarray, args))
        check_grads(jax.jit(call), args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("kv_heads", "j"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("attend", [reference.attend, blockwise.attend])
def test_the_attended_set_of_every_pass_can_be_read_off(attend, kv_heads, j):
    """Row t of pass j sees pass-0 rows <= t and its own row's keys of passes 1..j."""
    rows, passes = 6, 4
    one_hot = np.eye(rows * passes, dtype=np.float32).reshape(passes, 1, rows, 1, -1)
    values = np.repeat(one_hot, kv_heads, axis=3)
    q = jnp.zeros((1, rows, 2, rows * passes))
    intervals = jnp.asarray(packed(1, rows, (rows,)))

    @jax.jit
    def run(v, branch_v):
        zeros = jnp.zeros_like(branch_v)
        return attend(q, jnp.zeros_like(v), v, intervals, branch_k=zeros, branch_v=branch_v)

    out, lse = run(values[0], np.moveaxis(values[1 : j + 1], 0, 2))
    expected = np.zeros((rows, passes, rows), bool)
    expected[:, 0] = np.tri(rows, dtype=bool)
    for own in range(1, j + 1):
        np.fill_diagonal(expected[:, own], True)
    expected = expected.reshape(rows, -1)
    seen = np.broadcast_to((expected / expected.sum(1, keepdims=True))[:, None], out[0].shape)
    np.testing.assert_allclose(out[0], seen, atol=1e-6)
    np.testing.assert_allclose(np.exp(lse[0, :, 0]), expected.sum(1), rtol=1e-5)


def test_a_document_is_untouched_by_its_neighbour():
    """Bit for bit, values and gradients, also where both share a tile."""
    cut, time = 21, 40
    args, cotangents = operands(1, time, (4, 2), p=1, dtype=np.float32)
    intervals = jnp.asarray(packed(1, time, (cut, time - cut)))
    change = [x + 3 * (np.arange(time) >= cut).reshape(1, -1, *(1,) * (x.ndim - 2)) for x in args]
    run = with_gradients(functools.partial(blockwise.attend, **TILES), intervals)
    before, after = (
        run(tuple(a.astype(np.float32) for a in x), cotangents) for x in (args, change)
    )
    for name in before:
        assert (before[name][:, :cut] == after[name][:, :cut]).all(), name
        assert not np.allclose(before[name][:, cut:], after[name][:, cut:]), name


def test_bfloat16_accumulates_wide():
    args, cotangents = operands(1, 96, (4, 2), p=2, dtype=jnp.bfloat16)
    cotangents = cotangents[0], cotangents[1].astype(np.float32)
    intervals = jnp.asarray(packed(1, 96, (90,)))
    got = with_gradients(blockwise.attend, intervals)(args, cotangents)
    exact = tuple(a.astype(np.float32) for a in args)
    wide = cotangents[0].astype(np.float32), cotangents[1]
    expected = with_gradients(reference.attend, intervals)(exact, wide)
    for name, value in expected.items():
        assert got[name].dtype == (jnp.float32 if name == "lse" else jnp.bfloat16)
        error = np.abs(np.asarray(got[name], np.float32) - value).max() / np.abs(value).max()
        assert error < (5e-3 if name in ("out", "lse") else 3e-2), (name, error)


def loss(weights, q, k, v, intervals):
    """A stack of rematerialised layers with attention in each."""

    def layer(x, w):
        return x + blockwise.attend(x @ w, k, v, intervals, **TILES)[0], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), q, weights)
    return (x**3).sum()


def test_eight_devices_equal_one():
    """Inside shard_map, a scan and a checkpoint, with replicated and with sharded operands."""
    (q, k, v, *_), _ = operands(8, 20, (4, 2), dtype=np.float32)
    intervals = packed(8, 20, (12, 7))
    weights = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    mesh = compat.make_mesh((8,), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    # The trunk of the first row serves every device, so its gradient sums over them.
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(whole, rows, whole, whole, rows),
        out_specs=(whole, rows, whole, whole),
        check_vma=True,
    )
    def sharded(*args):
        return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    def single(weights, q, k, v, intervals):
        k, v = (jnp.broadcast_to(x, (8, *x.shape[1:])) for x in (k, v))
        return loss(weights, q, k, v, intervals)

    args = (weights, q, k[:1], v[:1], jnp.asarray(intervals))
    expected = jax.jit(jax.grad(single, argnums=(0, 1, 2, 3)))(*args)
    for got, want in zip(sharded(*args), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def shapes(time, heads=(4, 2), dim=32):
    q, k, v = (jax.ShapeDtypeStruct((1, time, h, dim), np.float32) for h in (*heads, heads[1]))
    return q, k, v, jax.ShapeDtypeStruct((1, time, 1, 2), np.int32)


def test_memory_does_not_grow_with_the_square():
    def step(q, k, v, intervals):
        def total(q, k, v):
            return blockwise.attend(q, k, v, intervals)[0].sum()

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    time = 4096
    compiled = jax.jit(step).lower(*shapes(time)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < time * time * 4 / 4


def test_residuals_are_the_operands_and_the_result():
    def residuals(q, k, v, intervals):
        return jax.vjp(lambda *a: blockwise.attend(*a, intervals), q, k, v)[1]

    args = shapes(300)
    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, *args)))
    assert kept <= sum(x.size for x in args) + args[0].size + 300 * 4


def test_saved_names_spare_the_second_forward_pass():
    def exponentials(policy):
        def call(q, k, v, intervals):
            return blockwise.attend(jnp.sin(q), k, v, intervals)[0].sum()

        step = jax.grad(jax.checkpoint(call, policy=policy), argnums=(0, 1, 2))
        return str(jax.make_jaxpr(step)(*shapes(64))).count("= exp ")

    names = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    assert exponentials(names) < exponentials(None)


def off_by_one(lo, hi, tile, size):
    keys = (tile[:, None] * size + jax.lax.iota(jnp.int32, size))[:, None]
    return ((keys >= lo[..., None]) & (keys <= hi[..., None]))[:, None, None]


def one_tile_short(lo, hi, size):
    first = lo.min(-1) // size
    return first, jnp.max(hi.max(-1) // size - first)


def first_sequence_only(tiling):
    return jnp.zeros_like(FAULTLESS_STARTS(tiling))


def branch_alone(scale, q, branch, d_out, lse, delta):
    """Normalises the branch by itself instead of jointly with the trunk."""
    own = jax.nn.logsumexp(blockwise._own_scores(q, branch[0]) * scale, axis=1)
    return FAULTLESS_BRANCH(scale, q, branch, d_out, own, delta)


FAULTLESS_BRANCH = blockwise._branch_backward
FAULTLESS_STARTS = blockwise._Tiling.first_keys


@functools.cache
def small():
    """Operands, cotangents, intervals and what the oracle says of them."""
    args, cotangents = operands(2, 20, (2, 1), p=1)
    intervals = jnp.asarray(packed(2, 20, (13, 7)))
    return (
        args,
        cotangents,
        intervals,
        with_gradients(reference.attend, intervals)(args, cotangents),
    )


@pytest.mark.parametrize(
    ("name", "fault", "shown_by"),
    [
        ("_visible", off_by_one, r"\nout\n"),
        ("_touched", one_tile_short, r"\nout\n"),
        ("_Tiling.first_keys", first_sequence_only, r"\nout\n"),
        ("_branch_backward", branch_alone, r"\nq\n"),
    ],
)
def test_planted_faults_are_seen(monkeypatch, name, fault, shown_by):
    monkeypatch.setattr(f"jaxspec.attention.blockwise.{name}", fault)
    with jax.enable_x64(True):
        args, cotangents, intervals, expected = small()
        run = with_gradients(functools.partial(blockwise.attend, **TILES), intervals)
        with pytest.raises(AssertionError, match=shown_by):
            assert_same(run(args, cotangents), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("time", "ranges"), [(127, 1), (130, 2)])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("p", [0, 1, 3])
def test_sweep(time, ranges, heads, p):
    intervals = shared(2, time) if ranges == 2 else packed(2, time, (61, 40, 20), window=50)
    with jax.enable_x64(True):
        assert_equal_to_oracle(
            *operands(2, time, heads, p=p), intervals, query_tile=32, key_tile=48
        )


@pytest.mark.exhaustive
def test_vectorised_over_a_further_axis():
    (q, k, v, *_), _ = operands(3, 24, (2, 1), dtype=np.float32)
    intervals = jnp.asarray(np.stack([packed(1, 24, n) for n in ((24,), (9, 15), (2, 20))]))

    def total(q, k, v, intervals):
        return (blockwise.attend(q, k, v, intervals, **TILES)[0] ** 2).sum()

    step = jax.grad(total, argnums=(0, 1, 2))
    args = tuple(x[:, None] for x in (q, k, v))
    together = jax.jit(jax.vmap(step))(*args, intervals)
    apart = jax.jit(step)(q, k, v, intervals[:, 0])
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-5, atol=1e-5)
