"""The distillation of packed rows against whole documents, full masks and float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import compat
from jaxspec.drafts import losses
from jaxspec.drafts.base import TargetView, target_view
from jaxspec.drafts.eagle3 import Eagle3, Eagle3Config, _from_teacher_row, _to_teacher_row
from jaxspec.packing import Sample, pack

VOCAB, DIM, TAPS, PASSES, LENGTH, ROW = 19, 8, 2, 3, 11, 24
EPS = 1e-5
CONFIG = Eagle3Config(
    hidden_size=DIM,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tap_layers=(1, 3),
    vocab_size=VOCAB,
    draft_vocab_size=10,
    num_passes=PASSES,
    pass_weights=(1.0, 0.8, 0.5),
    norm_before_fc=True,
    norm_before_residual=True,
    loss_chunk=16,
)
IDS = np.array([0, 1, 4, 5, 7, 8, 11, 13, 16, 18])
RANDOM = np.random.default_rng(0)
# What the policy says of a row depends on its token alone, so that it's the same in any packing.
TABLE = {
    "embedding": RANDOM.normal(size=(VOCAB, DIM)),
    "head": RANDOM.normal(size=(VOCAB, DIM)),
    "taps": RANDOM.normal(size=(VOCAB, TAPS * DIM)),
    "hidden": RANDOM.normal(size=(VOCAB, DIM)),
}


@functools.cache
def samples():
    """Two groups, a prompt of one token, a reply of one, of none, and one with a hole."""
    prompts = {0: RANDOM.integers(0, VOCAB, 6), 1: RANDOM.integers(0, VOCAB, 1)}
    out = []
    for group, reply in ((0, 5), (0, 3), (0, 1), (1, 1), (1, 7), (1, 0)):
        mask = np.ones(reply, bool)
        if reply == 7:
            mask[2:4] = False
        out.append(
            Sample(
                prompt=prompts[group],
                reply=RANDOM.integers(0, VOCAB, reply),
                logprobs=np.zeros(reply, np.float32),
                advantage=1.0,
                mask=mask,
                group=group,
            )
        )
    return out


def batch_of(docs, **how):
    batch, _ = pack(docs, **({"row_length": ROW, "num_ahead": PASSES + 1} | how))
    return jax.tree.map(jnp.asarray, batch)


def shared_batch():
    return batch_of(samples(), rows_multiple=4)


@functools.cache
def draft_params():
    """Parameters of the draft's table, larger than fresh ones, so that everything matters."""
    r = np.random.default_rng(5)
    scale = {1: lambda s: r.uniform(0.5, 1.5, s), 2: lambda s: r.normal(size=s) / s[0] ** 0.5}
    table = Eagle3(CONFIG).param_table()
    params = {k: scale[len(i.shape)](i.shape) for k, i in sorted(table.items())}
    params["lm_head"] = r.normal(size=table["lm_head"].shape)
    return params


def view_of(tokens):
    x = {k: jnp.asarray(v, jnp.float32) for k, v in TABLE.items()}
    hidden = x["hidden"][tokens]
    normaliser = jax.nn.logsumexp(hidden @ x["head"].T, axis=-1)
    return target_view(x["embedding"], x["head"], x["taps"][tokens], hidden, normaliser)


@functools.partial(jax.jit, static_argnums=0)
def distilled(config, params, view, batch):
    """(numerator, (denominator, metrics)), and gradients of the parameters and of the view."""

    def numerator(params, view):
        draft = Eagle3(config)
        ids = {"vocab_ids": jnp.asarray(IDS, jnp.int32)}
        out = draft.distill(params, ids, view, batch)
        return out.numerator, (draft.distill_denominator(batch), out.metrics)

    return jax.value_and_grad(numerator, argnums=(0, 1), has_aux=True)(params, view)


def run(batch, config=CONFIG):
    params = {k: jnp.asarray(v, jnp.float32) for k, v in draft_params().items()}
    return distilled(config, params, view_of(batch.tokens), batch)


def documents():
    """Tokens [document, LENGTH + PASSES + 1] and which of them are trained."""
    tokens = np.zeros((len(samples()), LENGTH + PASSES + 1), np.int64)
    trained = np.zeros(tokens.shape, bool)
    for i, s in enumerate(samples()):
        n = len(s.prompt) + len(s.reply)
        tokens[i, :n] = np.concatenate([s.prompt, s.reply])
        trained[i, len(s.prompt) : n] = s.mask
    return tokens, trained


def norm(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turn(x, positions):
    """RoPE of [time, heads, 4] in the half-split convention."""
    angle = positions[:, None] * 10000.0 ** -(np.arange(2) / 2)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :2], x[..., 2:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def textbook_document(params, tokens, trained):
    """Losses of the four objectives, acceptance and agreement [pass, row] of one document."""
    rows = np.arange(LENGTH)
    # The keys of all passes side by side: a triangle for the trunk, a diagonal for each branch.
    triangle, diagonal = np.tril(np.ones((LENGTH, LENGTH), bool)), np.eye(LENGTH, dtype=bool)
    h = norm(jnp.asarray(TABLE["taps"])[tokens[:LENGTH]], params["taps_norm"]) @ params["fc"]
    keys, values, out = [], [], []
    for d in range(1, PASSES + 1):
        e = jnp.asarray(TABLE["embedding"])[tokens[d : d + LENGTH]]
        u = jnp.concatenate([norm(e, params["input_norm"]), norm(h, params["hidden_norm"])], -1)
        q = turn((u @ params["q"]).reshape(LENGTH, 4, 4), rows + d - 1)
        keys.append(turn((u @ params["k"]).reshape(LENGTH, 2, 4), rows + d - 1))
        values.append((u @ params["v"]).reshape(LENGTH, 2, 4))
        k = jnp.repeat(jnp.concatenate(keys), 2, axis=1)
        v = jnp.repeat(jnp.concatenate(values), 2, axis=1)
        visible = np.concatenate([triangle] + [diagonal] * (d - 1), axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / 2.0
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        attended = jnp.einsum("hqk,khd->qhd", weights, v).reshape(LENGTH, -1)
        y = norm(h, params["hidden_norm"]) + attended @ params["o"]
        m = norm(y, params["mlp_norm"])
        h = y + (jax.nn.silu(m @ params["gate"]) * (m @ params["up"])) @ params["down"]

        student = norm(h, params["norm"]) @ params["lm_head"].T
        logits = jnp.asarray(TABLE["hidden"])[tokens[d : d + LENGTH]] @ TABLE["head"].T
        q_draft, p = jax.nn.softmax(student), jax.nn.softmax(logits)[:, IDS]
        renormalised = p / p.sum(-1, keepdims=True)
        accepted = jnp.minimum(p, q_draft).sum(-1)
        cross = -(renormalised * jnp.log(q_draft)).sum(-1)
        w = jax.lax.stop_gradient(jnp.exp(-3 * accepted))
        mix = w * cross + (1 - w) * (1 - accepted)
        loss = jnp.stack([cross, 1 - accepted, -jnp.log(accepted), mix])
        valid = trained[d + 1 : d + 1 + LENGTH]
        agree = student.argmax(-1) == logits[:, IDS].argmax(-1)
        out.append((loss * valid, accepted * valid, agree & valid, valid))
    return [jnp.stack(x) for x in zip(*out, strict=True)]


@functools.cache
def textbook():
    """Numerators of the four objectives, their gradients and the rest, in float64."""
    with jax.enable_x64(True):
        params = {k: jnp.asarray(v, jnp.float64) for k, v in draft_params().items()}
        tokens, trained = documents()

        def numerators(params):
            one = functools.partial(textbook_document, params)
            loss, accepted, agree, valid = jax.vmap(one)(jnp.asarray(tokens), jnp.asarray(trained))
            weighted = loss * np.asarray(CONFIG.pass_weights)[:, None, None]
            return weighted.sum((0, 1, 3)), (loss, accepted, agree, valid)

        grads, aux = jax.jit(jax.jacrev(numerators, has_aux=True))(params)
        return jax.tree.map(np.asarray, (grads, aux))


def textbook_numerator(objective):
    loss = textbook()[1][0][:, :, losses.OBJECTIVES.index(objective)]
    return (loss.sum((0, 2)) * CONFIG.pass_weights).sum()


OTHERS = [pytest.param(o, marks=pytest.mark.exhaustive) for o in losses.OBJECTIVES[1:]]


@pytest.mark.parametrize("objective", ["cross_entropy", *OTHERS])
def test_packed_rows_equal_the_textbook(objective):
    batch = shared_batch()
    assert batch.intervals.shape[2] == 2 and not np.asarray(batch.segment_ids)[-1].any()
    config = dataclasses.replace(CONFIG, objective=objective)
    (numerator, (denominator, metrics)), (grads, view_grads) = run(batch, config)
    want_grads, (loss, accepted, agree, valid) = textbook()
    which = losses.OBJECTIVES.index(objective)
    np.testing.assert_allclose(numerator, textbook_numerator(objective), rtol=3e-6)
    counts = valid.sum((0, 2))
    assert len(set(counts)) > 1
    np.testing.assert_allclose(denominator, counts @ CONFIG.pass_weights, rtol=1e-6)
    assert sorted(grads) == sorted(want_grads)
    for name, want in want_grads.items():
        want = want[which]
        np.testing.assert_allclose(
            grads[name], want, atol=2e-5 * np.abs(want).max(), rtol=1e-4, err_msg=name
        )
    for x in jax.tree.leaves(view_grads):
        assert not np.asarray(x).any()

    np.testing.assert_allclose(metrics["draft_loss"], (numerator, denominator), rtol=1e-6)
    for d in range(PASSES):
        for name, values in (("draft_loss", loss[:, d, which]), ("accept", accepted[:, d])):
            want = values.sum(), counts[d]
            np.testing.assert_allclose(metrics[f"{name}_pass_{d + 1}"], want, rtol=1e-5)
        assert metrics[f"top1_pass_{d + 1}"] == (agree[:, d].sum(), counts[d])
    tokens, trained = documents()
    anchor = trained[:, 1 : 1 + LENGTH]
    length = 1 + np.cumprod(accepted, axis=1).sum(1)
    want = (length * anchor).sum(), anchor.sum()
    np.testing.assert_allclose(metrics["expected_acceptance_length"], want, rtol=1e-5)
    covered = np.isin(tokens, IDS)[:, 1 : 1 + LENGTH] & anchor
    assert metrics["vocabulary_coverage"] == (covered.sum(), anchor.sum())


def test_a_shifted_mask_is_seen():
    batch = shared_batch()
    early = jnp.roll(batch.ahead_mask, 1, axis=-1)
    (numerator, _), _ = run(batch.replace(ahead_mask=early))
    assert abs(numerator / textbook_numerator("cross_entropy") - 1) > 1e-3


def test_unpacked_documents_give_the_same():
    want = run(shared_batch())
    got = run(batch_of(samples(), row_length=LENGTH + 1, packed=False))
    (numerator, aux), (grads, _) = got
    np.testing.assert_allclose(numerator, want[0][0], rtol=1e-6)
    np.testing.assert_allclose(*map(jax.tree.leaves, (aux, want[0][1])), rtol=1e-5)
    for name, x in grads.items():
        top = np.abs(want[1][0][name]).max()
        np.testing.assert_allclose(x, want[1][0][name], atol=1e-5 * top, err_msg=name)


def test_padding_alone_gives_zeros():
    nothing = jax.tree.map(jnp.zeros_like, shared_batch())
    out = run(nothing)
    for x in jax.tree.leaves(out):
        np.testing.assert_array_equal(x, 0)


def test_passes_beyond_the_reply_add_nothing():
    """Of a prompt and a reply of two tokens each, pass 2 trains one row and pass 3 none."""
    reply = Sample(
        prompt=np.array([3, 5]),
        reply=np.array([7, 9]),
        logprobs=np.zeros(2, np.float32),
        advantage=1.0,
    )
    (numerator, (denominator, metrics)), (grads, _) = run(batch_of([reply], rows_multiple=4))
    (first, rows_1), (second, rows_2) = (metrics[f"draft_loss_pass_{d}"] for d in (1, 2))
    assert (rows_1, rows_2) == (2, 1)
    np.testing.assert_allclose(numerator, first + 0.8 * second, rtol=1e-6)
    np.testing.assert_allclose(denominator, 2 + 0.8 * 1, rtol=1e-6)
    for name in ("draft_loss", "accept", "top1"):
        assert metrics[f"{name}_pass_3"] == (0, 0)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_a_row_may_be_shorter_than_the_passes_reach():
    x = jnp.ones((1, 2, 3))
    np.testing.assert_array_equal(_to_teacher_row(x, 1)[0, :, 0], [0, 1])
    np.testing.assert_array_equal(_from_teacher_row(x, 1)[0, :, 0], [1, 0])
    for move in (_to_teacher_row, _from_teacher_row):
        np.testing.assert_array_equal(move(x, 3), jnp.zeros_like(x))


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_two_devices_sum_to_one(marked):
    """Local numerators and gradients add up, whether or not the caller marks the parameters."""
    batch = shared_batch()
    (want, (_, metrics)), (want_grads, _) = run(batch)
    mesh = compat.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    params = {k: jnp.asarray(v, jnp.float32) for k, v in draft_params().items()}
    view = view_of(batch.tokens)
    rows = TargetView(
        embedding=P(), head=P(), taps=P("data"), hidden=P("data"), log_normaliser=P("data")
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), rows, P("data")), out_specs=P(), check_vma=True
    )
    def sharded(params, view, batch):
        if marked:
            params = compat.vary(params, ("data",))

        def numerator(params):
            ids = {"vocab_ids": jnp.asarray(IDS, jnp.int32)}
            out = Eagle3(CONFIG).distill(params, ids, view, batch)
            return out.numerator, out.metrics

        (local, metrics), grads = jax.value_and_grad(numerator, has_aux=True)(params)
        if marked:
            grads = jax.lax.psum(grads, "data")
        return jax.lax.psum(local, "data"), jax.lax.psum(metrics, "data"), grads

    got, got_metrics, grads = sharded(params, view, batch)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(*map(jax.tree.leaves, (got_metrics, metrics)), rtol=1e-5)
    for name, x in grads.items():
        top = np.abs(want_grads[name]).max()
        np.testing.assert_allclose(x, want_grads[name], atol=1e-5 * top, err_msg=name)


def test_a_batch_that_looks_too_short_ahead_is_refused():
    draft, batch = Eagle3(CONFIG), batch_of(samples(), num_ahead=PASSES)
    with pytest.raises(ValueError, match="3 tokens ahead.*num_passes=3 needs 4"):
        draft.distill_denominator(batch)
