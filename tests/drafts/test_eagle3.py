"""Training passes against drafting with a cache: the same rows must give the same logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import blockwise
from jaxspec.drafts.base import Draft, DraftWeights, target_view
from jaxspec.drafts.eagle3 import Eagle3, Eagle3Config, default_taps
from jaxspec.models.config import ModelConfig
from jaxspec.packing import Sample, pack
from jaxspec.params import check_params

VOCAB, DIM, PASSES, SLOTS = 23, 8, 3, 16
MODEL = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=DIM,
    intermediate_size=12,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
RANDOM = np.random.default_rng(0)
POLICY = {
    "embed": jnp.asarray(RANDOM.normal(size=(VOCAB, DIM)), jnp.float32),
    "lm_head": jnp.asarray(RANDOM.normal(size=(VOCAB, DIM)), jnp.float32),
}
REDUCED = Eagle3Config.from_policy(MODEL, num_passes=PASSES, draft_vocab_size=11)
WHOLE = Eagle3Config.from_policy(
    MODEL, num_passes=PASSES, norm_before_fc=True, norm_before_residual=True, num_kv_heads=1
)


@functools.cache
def fresh_weights(config):
    ids = np.arange(0, 22, 2) if config.draft_vocab_size == 11 else None
    return Eagle3(config).init(jax.random.key(1), POLICY, ids)


@functools.cache
def draft_and_weights(config):
    weights, r = fresh_weights(config), np.random.default_rng(2)
    # Norm weights away from 1, so that leaving one out or swapping two shows.
    params = {
        name: jnp.asarray(x * r.uniform(0.5, 1.5, x.shape) if x.ndim == 1 else x, jnp.float32)
        for name, x in weights.params.items()
    }
    for name in ("q", "k", "o", "down"):
        params[name] = 2 * params[name]
    return Eagle3(config), DraftWeights(params=params, buffers=weights.buffers)


@functools.cache
def packed():
    """Three documents in one row, with random taps on every row."""
    samples = [
        Sample(
            prompt=RANDOM.integers(0, VOCAB, p),
            reply=RANDOM.integers(0, VOCAB, r),
            logprobs=np.zeros(r, np.float32),
            advantage=1.0,
            group=group,
        )
        for group, (p, r) in enumerate([(3, 6), (2, 5), (4, 1)])
    ]
    batch, _ = pack(samples, row_length=24, num_ahead=PASSES + 1, share_prompts=False)
    batch = jax.tree.map(jnp.asarray, batch)
    assert batch.tokens.shape[0] == 1
    taps = RANDOM.normal(size=(1, 24, len(REDUCED.tap_layers) * DIM))
    return batch, jnp.asarray(taps, jnp.float32)


def anchors():
    """Rows that have a successor for every pass, as (first row of the document, row)."""
    batch, _ = packed()
    rows = np.flatnonzero(batch.ahead_mask[0, :, PASSES])
    return [(row - int(batch.positions[0, row]), row) for row in rows]


def training_logits(config, batch, num_passes=PASSES):
    """[pass, anchor, vocabulary] of the training passes."""
    draft, weights = draft_and_weights(config)
    draft = Eagle3(dataclasses.replace(config, num_passes=num_passes))

    def run(params, batch, taps):
        hidden = jnp.zeros((*batch.tokens.shape, DIM))
        view = target_view(POLICY["embed"], POLICY["lm_head"], taps, hidden)
        outputs = jnp.stack(draft.passes(params, view, batch))
        return draft.logits(params, outputs, "float32")

    logits = jax.jit(run)(weights.params, batch, packed()[1])
    return np.asarray(logits[:, 0, [row for _, row in anchors()]])


@functools.cache
def drafting_logits(config):
    """The same, drafted from each anchor with the tokens of the data, all anchors at once."""
    draft, weights = draft_and_weights(config)
    batch, taps = packed()
    first, row = (jnp.asarray(x) for x in zip(*anchors(), strict=True))
    count = row - first + 1
    spread = jnp.minimum(first[:, None] + jnp.arange(12), 23)
    tokens = batch.tokens[0]

    def run(weights):
        state = draft.new_state(len(row), SLOTS, "float32")
        state = draft.commit(
            weights,
            POLICY["embed"],
            state,
            tokens[jnp.minimum(spread + 1, 23)],
            taps[0, spread],
            jnp.zeros_like(count),
            count,
        )
        out = [draft.logits(weights.params, state.hidden, "float32")]
        for d in range(2, PASSES + 1):
            state = draft.step(weights, POLICY["embed"], state, tokens[row + d], count + (d - 2))
            out.append(draft.logits(weights.params, state.hidden, "float32"))
        return jnp.stack(out)

    return np.asarray(jax.jit(run)(weights))


@pytest.mark.parametrize("config", [REDUCED, WHOLE], ids=["reduced", "whole"])
def test_pass_d_equals_the_dth_draft_step(config):
    assert len(anchors()) >= 5 and len({first for first, _ in anchors()}) == 3
    np.testing.assert_allclose(
        training_logits(config, packed()[0]), drafting_logits(config), atol=1e-5
    )


def test_the_comparison_sees_a_rotary_position_that_stands_still(monkeypatch):
    batch, _ = packed()
    drafting_logits(REDUCED)
    project = Eagle3.project

    def still(self, params, embedded, feature, positions, names, dtype):
        return project(self, params, embedded, feature, batch.positions, names, dtype)

    monkeypatch.setattr(Eagle3, "project", still)
    assert_faulty_after_first_pass(training_logits(REDUCED, batch, 2))


def test_the_comparison_sees_a_trunk_that_moves_with_the_pass(monkeypatch):
    attend = blockwise.attend

    def moved(q, k, v, intervals, **branch):
        if branch:
            intervals = intervals + jnp.asarray([0, branch["branch_k"].shape[2]])
        return attend(q, k, v, intervals, **branch)

    monkeypatch.setattr(blockwise, "attend", moved)
    assert_faulty_after_first_pass(training_logits(REDUCED, packed()[0], 2))


def test_the_comparison_sees_an_embedding_that_is_not_shifted():
    batch, _ = packed()
    late = jnp.concatenate([batch.tokens[..., None], batch.ahead_tokens[..., :-1]], axis=-1)
    got = training_logits(REDUCED, batch.replace(ahead_tokens=late), 2)
    assert (np.abs(got - drafting_logits(REDUCED)[:2]).max((1, 2)) > 1e-2).all()


def assert_faulty_after_first_pass(got):
    first, second = np.abs(got - drafting_logits(REDUCED)[:2]).max((1, 2))
    assert first < 1e-5 and second > 1e-3


def test_ten_rounds_of_partial_acceptance_leave_what_a_fresh_commit_leaves():
    draft, weights = draft_and_weights(REDUCED)
    k, batch, slots = 3, 4, 48
    r = np.random.default_rng(3)
    tokens = jnp.asarray(r.integers(0, VOCAB, (batch, slots + 1)), jnp.int32)
    taps = jnp.asarray(r.normal(size=(batch, slots, len(REDUCED.tap_layers) * DIM)), jnp.float32)
    # Rows 0 and 1 stop early (nothing is committed any more), row 2 accepts all, row 3 nothing.
    counts = r.integers(1, k + 2, (10, batch))
    counts[4:, 0], counts[7:, 1], counts[:, 2], counts[:, 3] = 0, 0, k + 1, 1
    prompt = np.array([5, 3, 1, 4])

    def window(length):
        at = length[:, None] + jnp.arange(k + 1)
        return (
            jnp.take_along_axis(tokens, at + 1, axis=1, mode="clip"),
            jnp.take_along_axis(taps, at[..., None], axis=1, mode="clip"),
        )

    @jax.jit
    def rounds(weights):
        state = draft.new_state(batch, slots, "float32")
        length = jnp.asarray(prompt)
        start = jnp.zeros_like(length)
        state = draft.commit(
            weights, POLICY["embed"], state, tokens[:, 1:7], taps[:, :6], start, length
        )

        def one(carry, count):
            state, length = carry
            state = draft.propose(weights, POLICY["embed"], state, length, k, 0.0, None).state
            state = draft.commit(weights, POLICY["embed"], state, *window(length), length, count)
            return (state, length + count), None

        return jax.lax.scan(one, (state, length), jnp.asarray(counts))[0]

    @jax.jit
    def fresh(weights, length):
        state = draft.new_state(batch, slots, "float32")
        start = jnp.zeros_like(length)
        return draft.commit(weights, POLICY["embed"], state, tokens[:, 1:], taps, start, length)

    state, length = rounds(weights)
    np.testing.assert_array_equal(length, prompt + counts.sum(0))
    want = fresh(weights, length)
    np.testing.assert_allclose(state.hidden, want.hidden, atol=1e-5)
    committed = (np.arange(slots) < np.asarray(length)[:, None])[:, None, :, None]
    for a, b in ((state.keys, want.keys), (state.values, want.values)):
        np.testing.assert_allclose(a * committed, b * committed, atol=1e-5)
    # Cut one row short, the state is another one.
    short = fresh(weights, length - 1)
    assert (np.abs(state.hidden - short.hidden).max(-1) > 1e-3).all()


def test_proposals_are_target_ids_with_the_distributions_they_were_drawn_from():
    draft, weights = draft_and_weights(REDUCED)
    batch, taps = packed()
    count = jnp.asarray([3, 2])

    def forced(log_probs, j):
        return jnp.asarray([j, 10 - j]) + (jnp.abs(jnp.exp(log_probs).sum(-1) - 1) > 1e-5)

    @jax.jit
    def run(weights):
        state = draft.new_state(2, SLOTS, "float32")
        next_tokens, rows = jnp.tile(batch.tokens[:, 1:5], (2, 1)), jnp.tile(taps[:, :4], (2, 1, 1))
        start = jnp.zeros_like(count)
        state = draft.commit(weights, POLICY["embed"], state, next_tokens, rows, start, count)
        logits = draft.logits(weights.params, state.hidden, "float32")
        # The second token follows the first one.
        after = draft.step(weights, POLICY["embed"], state, jnp.asarray([0, 20]), count)
        second = draft.logits(weights.params, after.hidden, "float32")
        drawn = draft.propose(weights, POLICY["embed"], state, count, 2, 0.5, forced)
        greedy = draft.propose(weights, POLICY["embed"], state, count, 1, 0.0, None)
        return state, jnp.stack([logits, second], 1), drawn, greedy

    state, logits, drawn, greedy = run(weights)
    np.testing.assert_array_equal(drawn.tokens, [[0, 2], [20, 18]])
    np.testing.assert_allclose(drawn.probs, jax.nn.softmax(logits / 0.5), atol=1e-6)
    np.testing.assert_array_equal(drawn.state.hidden, state.hidden)
    assert greedy.probs is None
    np.testing.assert_array_equal(greedy.tokens[:, 0], 2 * logits[:, 0].argmax(-1))

    with pytest.raises(ValueError, match="k is 0"):
        draft.propose(weights, POLICY["embed"], state, count, 0, 0.0, None)
    with pytest.raises(ValueError, match="temperature is 1.0"):
        draft.propose(weights, POLICY["embed"], state, count, 1, 1.0, None)


def test_fresh_weights_fit_their_table_and_start_from_the_policy():
    draft = Eagle3(REDUCED)
    assert isinstance(draft, Draft) and hash(draft) == hash(Eagle3(REDUCED))
    ids = np.arange(11) * 2
    weights = fresh_weights(REDUCED)
    check_params(draft.param_table(), weights.params, "draft")
    check_params(draft.buffer_table(), weights.buffers, "buffers")
    np.testing.assert_array_equal(weights.params["lm_head"], POLICY["lm_head"][ids])
    # The layer hardly changes the feature that the head reads.
    r = np.random.default_rng(4)
    feature = jnp.asarray(r.normal(size=(1, 5, DIM)), jnp.float32)
    attended = jnp.asarray(r.normal(size=(1, 5, 4, 4)), jnp.float32)
    finish = jax.jit(functools.partial(draft.finish, dtype="float32"))
    change = finish(weights.params, feature, attended) - feature
    assert jnp.std(change) < 0.6 * jnp.std(feature)
    with pytest.raises(ValueError, match="draft_vocab_size=11 is less than vocab_size=23"):
        draft.init(jax.random.key(0), POLICY)
    with pytest.raises(ValueError, match="holds 10 ids.*draft_vocab_size=11"):
        draft.init(jax.random.key(0), POLICY, ids[:10])
    with pytest.raises(ValueError, match="from 20 to 0"):
        draft.init(jax.random.key(0), POLICY, ids[::-1].copy())


def test_default_taps_of_known_depths():
    assert default_taps(36) == (1, 17, 32)
    assert default_taps(28) == (1, 13, 24)
    assert default_taps(32) == (1, 15, 28)
    assert [default_taps(n) for n in (1, 2, 4, 6)] == [(0,), (0, 1), (1,), (1, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 3}, "head_dim=3"),
        ({"tap_layers": (3, 1)}, r"tap_layers=\(3, 1\)"),
        ({"tap_layers": ()}, r"tap_layers=\(\)"),
        ({"draft_vocab_size": 24}, "draft_vocab_size=24 exceeds vocab_size=23"),
        ({"objective": "kl"}, "'kl'"),
        ({"pass_weights": (1.0,)}, "1 entries for num_passes=3"),
        ({"pass_weights": (1.0, 0.0, 1.0)}, "must be positive"),
        ({"num_passes": 0}, "num_passes is 0"),
    ],
)
def test_configurations_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WHOLE, **change)


def test_taps_beyond_the_policy_are_refused():
    with pytest.raises(ValueError, match=r"tap_layers \(1, 7\).*7 layers"):
        Eagle3Config.from_policy(MODEL, tap_layers=(1, 7))
