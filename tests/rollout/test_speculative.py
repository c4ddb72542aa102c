"""The generation program as a whole, on a tiny policy and a tiny draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import blockwise, spec
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.mesh import MeshConfig, make_mesh
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.params import init_params
from jaxspec.rollout.config import RolloutConfig
from jaxspec.rollout.processors import SamplingConfig
from jaxspec.rollout.sampler import Sampler

MODEL = ModelConfig(
    family="llama",
    vocab_size=7,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
STOP = 6
ROWS, TEMPERATURE = 1024, 0.7
PROMPTS = [np.array([1, 2, 3]), np.array([4, 0, 5, 2, 2, 1, 3]), np.array([5])]


def draft_of(draft_vocab_size=5, num_passes=3):
    config = Eagle3Config.from_policy(
        MODEL, num_passes=num_passes, tap_layers=(0, 1), draft_vocab_size=draft_vocab_size
    )
    return Eagle3(config)


@pytest.fixture(scope="module")
def params():
    params = init_params(policy.param_table(MODEL), jax.random.key(0))
    # A sharp policy: a fresh one is nearly uniform, and everything would be accepted.
    params["embed"] = params["embed"] * 10
    return params


@pytest.fixture(scope="module")
def weights(params):
    ids = np.array([0, 2, 3, 4, 6])
    return draft_of().init(jax.random.key(1), params, ids)


def sampler(devices=1, draft=True, **settings):
    sampling = SamplingConfig(temperature=settings.pop("temperature", TEMPERATURE))
    fields = {"max_new_tokens": 12, "batch_size": ROWS, "prompt_buckets": (8,)}
    fields["num_draft_tokens"] = 3
    config = RolloutConfig(sampling=sampling, **(fields | settings))
    mesh = make_mesh(MeshConfig(data=devices))
    return Sampler(MODEL, config, mesh, (STOP,), draft_of() if draft else None)


@pytest.fixture(scope="module")
def speculative():
    return sampler()


def policy_logits(params, tokens):
    """Logits of the next token at every position of one sequence."""
    tokens = jnp.asarray(tokens)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    intervals = spec.causal_intervals(jnp.ones_like(tokens), positions)
    out = policy.forward(
        params, MODEL, tokens, positions, lambda q, k, v: blockwise.attend(q, k, v, intervals)[0]
    )
    return out.hidden[0] @ policy.head(params).T


def test_logprobs_equal_a_teacher_forced_pass(speculative, params, weights):
    result = speculative(params, weights, PROMPTS, jax.random.key(3))
    for i, prompt in enumerate(PROMPTS):
        n = result.lengths[i]
        reply = result.tokens[i, :n]
        whole = np.concatenate([prompt, reply])
        logits = policy_logits(params, whole)[len(prompt) - 1 : -1]
        for got, temperature in ((result.logprobs, TEMPERATURE), (result.raw_logprobs, 1.0)):
            want = np.asarray(jax.nn.log_softmax(logits / temperature))[np.arange(n), reply]
            np.testing.assert_allclose(got[i, :n], want, atol=1e-5)
        assert not result.logprobs[i, n:].any() and not result.tokens[i, n:].any()


def test_bookkeeping_adds_up(speculative, params, weights):
    result = speculative(params, weights, PROMPTS * 2, jax.random.key(4))
    for i in range(len(result.lengths)):
        n = result.lengths[i]
        accepted = (result.origin[i, :n] == 2).sum()
        assert accepted == result.accepted[i].sum()
        # One token comes from the prefill, each verify adds its accepted ones and at most one more.
        assert n - 1 - accepted <= result.verifies[i] <= n - 1
        assert (result.rejected[i, n:] == -1).all()
        assert result.finished[i] == (result.tokens[i, n - 1] == STOP)
        assert (result.tokens[i, : n - 1] != STOP).all()
    assert result.accepted.sum() > 0 and (result.rejected >= 0).sum() > 0


@pytest.mark.parametrize("cap", [1, 2, 12])
def test_cap_is_exact(params, weights, cap, speculative):
    result = speculative(params, weights, PROMPTS, jax.random.key(5), max_new_tokens=cap)
    assert (result.lengths <= cap).all()
    assert ((result.lengths == cap) | result.finished).all()


def test_rows_are_independent_of_their_batch(speculative, params, weights):
    key = jax.random.key(6)
    together = speculative(params, weights, PROMPTS, key)
    for i, prompt in enumerate(PROMPTS):
        alone = speculative(params, weights, [prompt], key, first_row_id=i)
        n = together.lengths[i]
        assert alone.lengths[0] == n
        np.testing.assert_array_equal(alone.tokens[0, :n], together.tokens[i, :n])
    # Nothing of one call is left over in the next, nor in a policy laid out beforehand.
    again = speculative(speculative.prepare(params), weights, PROMPTS, key)
    np.testing.assert_array_equal(again.tokens, together.tokens)


def test_devices_do_not_change_the_replies(speculative, params, weights):
    key = jax.random.key(7)
    one = speculative(params, weights, PROMPTS * 2, key)
    four = sampler(devices=4)(params, weights, PROMPTS * 2, key)
    np.testing.assert_array_equal(one.tokens, four.tokens)
    np.testing.assert_allclose(one.logprobs, four.logprobs, atol=1e-5)


def test_greedy_equals_plain_greedy(params, weights):
    plain = sampler(draft=False, temperature=0.0)(params, None, PROMPTS, jax.random.key(0))
    drafted = sampler(temperature=0.0, draft_temperature=0.0)
    fast = drafted(params, weights, PROMPTS, jax.random.key(1))
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    assert plain.accepted.shape[1] == 0


def enumerate_pairs(params, prompt):
    """Probability of every (first, second) reply token under plain decoding; STOP ends a reply."""
    pairs = np.zeros((7, 7))
    first = np.asarray(jax.nn.softmax(policy_logits(params, prompt)[-1] / TEMPERATURE))
    for a in range(7):
        logits = policy_logits(params, np.append(prompt, a))[-1]
        second = np.asarray(jax.nn.softmax(logits / TEMPERATURE))
        pairs[a] = first[a] * (second if a != STOP else np.eye(7)[0])
    return pairs


def chi_square(counts, want):
    """Returns the statistic over the likely pairs, and a value it exceeds once in 10^6 runs."""
    expected = want * counts.sum()
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    return statistic, freedom + 5 * np.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("draft_temperature", [1.0, 0.0])
def test_replies_follow_the_policy(params, weights, speculative, draft_temperature):
    run = speculative if draft_temperature else sampler(draft_temperature=0.0)
    prompt = PROMPTS[1]
    want = enumerate_pairs(params, prompt)
    counts = np.zeros((7, 7))
    for seed in range(8):
        result = run(
            params,
            weights,
            [prompt] * ROWS,
            jax.random.key(100 + seed),
            max_new_tokens=3,
        )
        second = np.where(result.lengths > 1, result.tokens[:, 1], 0)
        np.add.at(counts, (result.tokens[:, 0], second), 1)
    statistic, limit = chi_square(counts, want)
    assert statistic < limit
    # The same counts do not pass for a distribution that is off.
    tilted = want * (1 + 0.6 * (np.arange(7) % 2))
    assert chi_square(counts, tilted / tilted.sum())[0] > limit


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompts"),
        ([np.array([], int)], {}, "prompt 0 is empty"),
        ([np.arange(9) % 7], {}, "prompt 0 has 9 tokens and .*prompt_buckets is 8"),
        ([np.array([7])], {}, "outside the vocabulary of 7"),
        ([np.array([1])], {"max_new_tokens": 13}, "max_new_tokens=13 is not within 1..12"),
        ([np.array([1])], {"samples_per_prompt": 3}, "3 samples per prompt do not divide"),
    ],
)
def test_bad_calls_are_refused(speculative, params, weights, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        speculative(params, weights, prompts, jax.random.key(0), **settings)
