"""Losslessness by enumeration of every draft and every draw, and the real draws by chi-square."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout import verify as verify_lib
from jaxspec.rollout.processors import SamplingConfig, process_logits
from jaxspec.rollout.sampling import Purpose, draw, purpose_keys, row_keys, uniforms

V, CAP, STOP = 4, 3, 1
CONTEXTS = (V + 1) ** 2  # The two last tokens, V where there is none.

accept = jax.jit(verify_lib.acceptance_probabilities)
following = jax.jit(verify_lib.next_distribution)
commit = jax.jit(verify_lib.commit_block, static_argnames="stop_ids")
process = jax.jit(process_logits, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the enumeration puts together; a fault replaces one of them."""

    accept: Callable = accept
    following: Callable = following
    commit: Callable = commit


@dataclasses.dataclass(frozen=True)
class Draft:
    """For each context what is drawn from, and what verify is told (None: chosen outright)."""

    drawn: np.ndarray
    told: np.ndarray | None
    vocab_ids: np.ndarray | None = None
    num_drafted: Callable | None = None


def logits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(CONTEXTS, V)).astype(np.float32) * 1.5


def softmax(logits: np.ndarray, config: SamplingConfig | None = None) -> np.ndarray:
    return np.exp(np.asarray(process(logits, config or SamplingConfig())))


def context(tokens: np.ndarray) -> np.ndarray:
    """Index of the table's row after [..., n] tokens."""
    none = np.full((*tokens.shape[:-1], 2), V)
    last = np.concatenate([none, tokens], axis=-1)[..., -2:]
    return last[..., 0] * (V + 1) + last[..., 1]


def code(tokens) -> int:
    """A sequence of at most CAP tokens as one number; tokens count from 1."""
    return sum((token + 1) * (V + 1) ** i for i, token in enumerate(tokens))


def plain(policy: np.ndarray) -> np.ndarray:
    """Probability of each output of plain decoding, until STOP or CAP tokens."""
    out = np.zeros((V + 1) ** CAP)

    def walk(tokens, probability):
        if len(tokens) == CAP or STOP in tokens[-1:]:
            out[code(tokens)] += probability
            return
        p = policy[context(np.array(tokens, int))]
        for token in range(V):
            walk([*tokens, token], probability * float(p[token]))

    walk([], 1.0)
    return out


@functools.cache
def layout(k: int):
    """Every unfinished prefix with every draft: prefixes, rows, tokens, lengths, contexts."""
    others = [token for token in range(V) if token != STOP]
    prefixes = [p for n in range(CAP) for p in itertools.product(others, repeat=n)]
    drafts = list(itertools.product(range(V), repeat=k))
    rows = list(itertools.product(range(len(prefixes)), drafts))
    tokens = np.array([draft for _, draft in rows], np.int32).reshape(len(rows), k)
    length = np.array([len(prefixes[i]) for i, _ in rows])
    at = [
        [context(np.array([*prefixes[i], *draft[:j]], int)) for j in range(k + 1)]
        for i, draft in rows
    ]
    return prefixes, [i for i, _ in rows], tokens, length, np.array(at)


def speculative(policy, draft: Draft, k: int, pieces: Pieces | None = None) -> np.ndarray:
    """Probability of each output of repeated verifies, by enumeration of all that can happen."""
    pieces = pieces or Pieces()
    prefixes, rows, tokens, length, at = layout(k)
    with np.errstate(divide="ignore"):
        target = np.maximum(np.log(policy[at]), -1e30).astype(np.float32)
    told = None if draft.told is None else draft.told[at[:, :k]].astype(np.float32)
    extra = {"vocab_ids": draft.vocab_ids, "num_drafted": None}
    if draft.num_drafted is not None:
        extra["num_drafted"] = np.minimum(draft.num_drafted(length), k).astype(np.int32)
    yes = np.asarray(pieces.accept(target, tokens, told, **extra), np.float64)
    drawn = np.prod(np.take_along_axis(draft.drawn[at[:, :k]], tokens[..., None], 2)[..., 0], 1)

    outcomes = []  # (row, weight, emitted tokens, count, finished)
    for n in range(k + 1):
        count = np.full(len(rows), n, np.int32)
        weight = drawn * np.prod(yes[:, :n], axis=1) * (1 - yes[:, n] if n < k else 1)
        after = np.asarray(pieces.following(target, tokens, told, count, **extra), np.float64)
        for token in range(V):
            chosen = np.full(len(rows), token, np.int32)
            left = (CAP - length).astype(np.int32)
            done = pieces.commit(tokens, count, chosen, left, stop_ids=(STOP,))
            outcomes.append((weight * after[:, token], done))

    reach = {prefix: float(prefix == ()) for prefix in prefixes}
    out = np.zeros((V + 1) ** CAP)
    lists = [
        (w, np.asarray(c.tokens).tolist(), np.asarray(c.counts).tolist(), np.asarray(c.finished))
        for w, c in outcomes
    ]
    for row, i in enumerate(rows):  # Prefixes come in order of length.
        prefix = prefixes[i]
        for weight, emitted, counts, finished in lists:
            probability = reach[prefix] * weight[row]
            if probability == 0:
                continue
            longer = (*prefix, *emitted[row][: counts[row]])
            if finished[row] or longer not in reach:
                out[code(longer)] += probability
            else:
                reach[longer] += probability
    return out


POLICIES = {
    "greedy": SamplingConfig(temperature=0.0),
    "T=0.5": SamplingConfig(temperature=0.5),
    "T=1": SamplingConfig(),
    "T=2": SamplingConfig(temperature=2.0),
    "top_k=1": SamplingConfig(top_k=1),
    "top_k=3": SamplingConfig(top_k=3),
    "top_p=0.5": SamplingConfig(top_p=0.5),
    "top_p=0.9": SamplingConfig(top_p=0.9),
    "min_p": SamplingConfig(min_p=0.3),
    "all": SamplingConfig(temperature=2.0, top_k=3, top_p=0.9, min_p=0.2),
}


def drafts_against(policy: np.ndarray, config: SamplingConfig) -> dict[str, Draft]:
    own = logits_of(2)
    small = np.array([0, 1, 3], np.int32)
    reduced = softmax(own[:, small], SamplingConfig(temperature=0.7))
    spread = np.zeros_like(policy)
    spread[:, small] = reduced
    worst = np.eye(V, dtype=np.float32)[np.argmin(policy, axis=-1)]
    outside = np.where(policy > 1e-6, 0, 1.0).astype(np.float32)
    outside[outside.sum(-1) == 0] = 1
    outside /= outside.sum(-1, keepdims=True)
    best = np.eye(V, dtype=np.float32)[np.argmax(own, axis=-1)]
    random = softmax(own)
    return {
        "perfect": Draft(policy, policy),
        "random": Draft(random, random),
        "processed alike": Draft(softmax(own, config), softmax(own, config)),
        "reduced": Draft(spread, reduced, small),
        "arg-max": Draft(best, None),
        "arg-max told": Draft(best, best),
        "drawn, taken as chosen": Draft(random, None),
        "worst": Draft(worst, worst),
        "disjoint": Draft(outside, outside),
        "varying length": Draft(random, random, None, lambda length: (length + 1) % 3),
    }


@pytest.mark.parametrize("k", [1, 2, 3])
def test_output_is_that_of_plain_decoding(k):
    for name, config in POLICIES.items():
        if k != 2 and name not in ("greedy", "T=1", "all"):
            continue
        policy = softmax(logits_of(1), config)
        want = plain(policy)
        assert want.sum() == pytest.approx(1, abs=1e-6)
        for kind, draft in drafts_against(policy, config).items():
            got = speculative(policy, draft, k)
            np.testing.assert_allclose(got, want, atol=1e-6, err_msg=f"{name}, {kind}")


def test_without_a_draft_it_is_plain_decoding():
    policy = softmax(logits_of(1))
    np.testing.assert_allclose(
        speculative(policy, Draft(policy, None), 0), plain(policy), atol=1e-6
    )


def faults() -> dict[str, tuple[Draft, Pieces]]:
    own = logits_of(2)
    cut, raw = softmax(own, SamplingConfig(top_k=2)), softmax(own)
    best = np.eye(V, dtype=np.float32)[np.argmax(own, axis=-1)]
    good = Draft(raw, raw)

    def from_p(target, tokens, told, count, **_):
        return np.exp(target[np.arange(len(count)), count])

    def one_back(tokens, count, chosen, left, stop_ids):
        return commit(tokens, np.maximum(count - 1, 0), chosen, left, stop_ids=stop_ids)

    def no_bonus(tokens, count, chosen, left, stop_ids):
        chosen = np.where(count == 2, 0, chosen)
        return commit(tokens, count, chosen, left, stop_ids=stop_ids)

    def through(tokens, count, chosen, left, stop_ids):
        return commit(tokens, count, chosen, left, stop_ids=())

    def always(target, tokens, told, **extra):
        return np.ones(tokens.shape)

    return {
        "raw q for draws from processed q": (Draft(cut, raw), Pieces()),
        "softmax q for arg-max": (Draft(best, raw), Pieces()),
        "residual without subtracting q": (good, Pieces(following=from_p)),
        "every proposal accepted": (good, Pieces(accept=always)),
        "commit one short": (good, Pieces(commit=one_back)),
        "bonus overwritten": (good, Pieces(commit=no_bonus)),
        "stop overlooked": (good, Pieces(commit=through)),
    }


@pytest.mark.parametrize("name", faults())
def test_the_enumeration_sees(name):
    draft, pieces = faults()[name]
    policy = softmax(logits_of(1))
    assert np.abs(speculative(policy, draft, 2, pieces) - plain(policy)).sum() > 0.01


def test_the_enumeration_sees_a_residual_that_keeps_q(monkeypatch):
    monkeypatch.setattr(verify_lib, "residual", lambda p, q: p)
    policy, raw = softmax(logits_of(1)), softmax(logits_of(2))
    pieces = Pieces(following=jax.jit(lambda *a, **e: verify_lib.next_distribution(*a, **e)))
    wrong = speculative(policy, Draft(raw, raw), 1, pieces)
    assert np.abs(wrong - plain(policy)).sum() > 0.01


def one_token(p, drawn, told) -> tuple[np.ndarray, float]:
    """Exact output distribution and acceptance of one proposal."""
    p, drawn = np.asarray(p, np.float32), np.asarray(drawn, np.float64)
    size = p.size
    target = np.log(np.broadcast_to(p, (size, 2, size)))
    told = None if told is None else np.broadcast_to(np.float32(told), (size, 1, size))
    tokens = np.arange(size, dtype=np.int32)[:, None]
    yes = np.asarray(accept(target, tokens, told), np.float64)[:, 0]
    after = np.asarray(following(target, tokens, told, np.zeros(size, np.int32)), np.float64)
    return drawn * yes + (drawn * (1 - yes)) @ after, float(drawn @ yes)


def test_proposals_from_a_truncated_draft():
    p, raw, cut = np.full(4, 0.25), [0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0]
    out, rate = one_token(p, cut, cut)
    np.testing.assert_allclose(out, p, atol=1e-6)
    assert rate == pytest.approx(0.5, abs=1e-6)
    wrong, _ = one_token(p, cut, raw)
    np.testing.assert_allclose(wrong, [0.357, 0.357, 0.071, 0.214], atol=1e-3)
    assert np.abs(wrong - p).sum() / 2 == pytest.approx(0.214, abs=1e-3)


def test_proposals_chosen_outright():
    p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    out, rate = one_token(p, [1, 0, 0], None)
    np.testing.assert_allclose(out, p, atol=1e-6)
    assert rate == pytest.approx(0.5)
    np.testing.assert_allclose(one_token(p, [1, 0, 0], q)[0], [0.833, 0, 0.167], atol=1e-3)
    # Drawn proposals are accepted with the overlap of p and q, not with their inner product.
    out, rate = one_token(p, q, q)
    np.testing.assert_allclose(out, p, atol=1e-6)
    assert rate == pytest.approx(0.9, abs=1e-6)


def test_proposals_drawn_in_bfloat16():
    logits = np.array([1.0, 1.001, 0.3, -0.2, 0.1, 0.9, -1.0, 2.001], np.float32)
    rounded = logits.astype(jnp.bfloat16).astype(np.float32)
    assert rounded[0] == rounded[1]
    low, full = (np.exp(x) / np.exp(x).sum() for x in (rounded, logits))
    p = np.random.default_rng(0).dirichlet(np.ones(8))
    np.testing.assert_allclose(one_token(p, low, low)[0], p, atol=1e-6)
    assert np.abs(one_token(p, low, full)[0] - p).sum() > 1e-4


def test_a_token_that_q_cannot_give_is_refused():
    target = np.log(np.full((1, 2, 4), 0.25, np.float32))
    ids = np.array([0, 3], np.int32)
    half = np.full((1, 1, 2), 0.5, np.float32)
    for token, want in [(0, 0.5), (1, 0.0), (3, 0.5), (2, 0.0)]:
        got = accept(target, np.array([[token]], np.int32), half, vocab_ids=ids)
        assert float(got[0, 0]) == pytest.approx(want)


def test_an_empty_residual_falls_back_to_the_policy():
    p = jnp.array([[0.5, 0.3, 0.2]])
    np.testing.assert_array_equal(verify_lib.residual(p, p), p)
    np.testing.assert_allclose(verify_lib.residual(p, jnp.array([[0.5, 0.5, 0.0]])), [[0, 0, 1]])


def test_shapes_that_disagree():
    keys = row_keys(jax.random.key(0), jnp.arange(2), jnp.arange(2))
    target, tokens = jnp.zeros((2, 3, 5)), jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match="3 positions for 1 draft tokens"):
        verify_lib.verify(target, tokens[:, :1], None, keys)
    with pytest.raises(ValueError, match="covers 4 tokens and target_log_probs 5"):
        verify_lib.verify(target, tokens, jnp.zeros((2, 2, 4)), keys)
    with pytest.raises(ValueError, match="3 ids for 4"):
        verify_lib.verify(target, tokens, jnp.zeros((2, 2, 4)), keys, vocab_ids=jnp.arange(3))


ROWS = 100_000


def draft_and_verify(key, policy, draft, *, k, rows):
    """One round from an empty prefix: neighbours have the keys of one row at two positions."""
    keys = row_keys(key, jnp.arange(rows) // 2, jnp.arange(rows) % 2)
    tokens = jnp.full((rows, 2), V)
    probs = []
    for j in range(k):
        probs.append(draft[tokens[:, -2] * (V + 1) + tokens[:, -1]])
        token = draw(jnp.log(probs[-1]), purpose_keys(keys, Purpose.DRAFT, j))
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
    at = tokens[:, :-1] * (V + 1) + tokens[:, 1:]
    result = verify_lib.verify(jnp.log(policy[at]), tokens[:, 2:], jnp.stack(probs, 1), keys)
    left = jnp.full(rows, k + 1)
    block = result.num_accepted, result.next_token
    return verify_lib.commit_block(tokens[:, 2:], *block, left, ()), result


def real_draws(policy, draft, k, rows):
    """Draws with real keys; returns what was committed and the verdict."""
    run = jax.jit(lambda *args: draft_and_verify(*args, k=k, rows=rows))
    return jax.device_get(run(jax.random.key(3), policy, draft))


def excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square above its mean, in its standard deviations."""
    dof = expected.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - dof) / np.sqrt(2 * dof))


def test_real_draws_follow_the_policy():
    policy, draft = softmax(logits_of(1)), softmax(logits_of(2))
    done, result = real_draws(policy, draft, 2, ROWS)
    start = context(np.zeros(0, int))
    first = np.bincount(done.tokens[:, 0], minlength=V)
    assert excess(first, ROWS * policy[start]) < 6
    for token in range(V):  # The second, given the first, where this verify emitted it.
        second = done.tokens[(done.counts >= 2) & (done.tokens[:, 0] == token), 1]
        want = len(second) * policy[context(np.array([token]))]
        assert excess(np.bincount(second, minlength=V), want) < 6
    overlap = np.minimum(policy[start], draft[start]).sum()
    spread = np.sqrt(overlap * (1 - overlap) / ROWS)
    assert abs((result.num_accepted >= 1).mean() - overlap) < 4 * spread
    # The log-probabilities are the policy's, whoever proposed the token.
    lp = np.log(policy)
    np.testing.assert_allclose(result.log_probs[:, 0], lp[start, done.tokens[:, 0]], atol=1e-5)
    assert (result.log_probs[np.arange(3) >= done.counts[:, None]] == 0).all()
    assert ((result.rejected >= 0) == (result.num_accepted < 2)).all()
    # Verifies of one row at two positions are independent.
    table = np.zeros((V, V))
    np.add.at(table, (done.tokens[::2, 0], done.tokens[1::2, 0]), 1)
    assert excess(table, table.sum(1, keepdims=True) * table.sum(0) / table.sum()) < 6


def test_one_number_for_acceptance_and_residual_is_seen(monkeypatch):
    def shared(keys, count):
        first = uniforms(keys, 1)
        return jnp.broadcast_to(first, (first.shape[0], count))

    monkeypatch.setattr(verify_lib, "uniforms", shared)
    monkeypatch.setattr(verify_lib, "purpose_keys", lambda keys, purpose: keys)
    policy, draft = softmax(logits_of(1)), softmax(logits_of(2))
    done, _ = real_draws(policy, draft, 1, 20_000)
    first = np.bincount(done.tokens[:, 0], minlength=V)
    assert excess(first, 20_000 * policy[context(np.zeros(0, int))]) > 20


def test_length_at_a_constant_acceptance():
    rows, k = 8_000, 5

    @jax.jit
    def counts(policy, draft, num_drafted):
        drafting, verifying = (
            row_keys(jax.random.key(seed), jnp.arange(n), jnp.zeros(n, jnp.int32))
            for seed, n in ((1, rows * k), (2, rows))
        )
        tokens = draw(jnp.broadcast_to(jnp.log(draft), (rows * k, V)), drafting).reshape(rows, k)
        target = jnp.broadcast_to(jnp.log(policy), (rows, k + 1, V))
        q = jnp.broadcast_to(draft, (rows, k, V))
        drafted = jnp.broadcast_to(num_drafted, rows)
        return verify_lib.verify(target, tokens, q, verifying, num_drafted=drafted).num_accepted + 1

    policy = np.array([0.5, 0.5, 1e-9, 1e-9], np.float32)
    for rate, used, length in [(0.8, 4, 3.3616), (0.7, 1, 1.7), (0.7, 3, 2.533), (0.7, 5, 2.9412)]:
        draft = np.array([0.5, rate - 0.5, 1 - rate, 1e-9], np.float32)
        got = np.asarray(counts(policy, draft, used))
        assert abs(got.mean() - length) < 3 * got.std() / np.sqrt(rows)


def test_a_block_ends_at_its_stop_token_or_the_cap():
    drafts = np.array([[10, 11, 9, 20, 21, 22]] * 6, np.int32)
    accepted = np.array([6, 6, 1, 2, 0, 6], np.int32)
    chosen = np.array([23, 23, 30, 9, 31, 23], np.int32)
    left = np.array([5, 2, 9, 9, 1, 0], np.int32)
    done = jax.device_get(commit(drafts, accepted, chosen, left, stop_ids=(9, 8)))
    rows = [row[:n].tolist() for row, n in zip(done.tokens, done.counts, strict=True)]
    assert rows == [[10, 11, 9], [10, 11], [10, 30], [10, 11, 9], [31], []]
    assert done.accepted.tolist() == [3, 2, 1, 2, 0, 0]
    assert done.stopped.tolist() == [True, False, False, True, False, False]
    assert done.finished.tolist() == [True, True, False, True, True, True]
    assert (done.tokens[np.arange(7) >= done.counts[:, None]] == 0).all()
