import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout import sampling
from jaxspec.rollout.processors import REMOVED, SamplingConfig, process_logits
from jaxspec.rollout.sampling import Purpose, draw, purpose_keys, row_keys, sample, uniforms

CONFIGS = [
    SamplingConfig(temperature=0.0, top_k=3),
    SamplingConfig(),
    SamplingConfig(temperature=0.5),
    SamplingConfig(top_k=1),
    SamplingConfig(top_k=7),
    SamplingConfig(top_k=500),
    SamplingConfig(top_p=0.61),
    SamplingConfig(temperature=2.0, top_p=0.93),
    SamplingConfig(top_p=0.01),
    SamplingConfig(min_p=0.07),
    SamplingConfig(top_p=0.8, min_p=0.11),
    SamplingConfig(temperature=0.7, top_k=9, top_p=0.87, min_p=0.03),
]


def oracle(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Sorts every row by (logit, id) and truncates in float64."""
    out = np.full(logits.shape, REMOVED)
    for row, scores in zip(out, logits, strict=True):
        order = np.lexsort((np.arange(scores.size), -scores))
        if config.temperature == 0:
            row[order[0]] = 0.0
            continue
        scores = (scores / np.float32(config.temperature)).astype(np.float64)
        order = order[: config.top_k or None]
        probs = np.exp(scores[order] - scores[order[0]])
        before = np.cumsum(probs) - probs
        keep = (before < config.top_p * probs.sum()) & (probs >= config.min_p)
        kept = order[keep]
        row[kept] = scores[kept] - np.log(np.exp(scores[kept]).sum())
    return out


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_truncation_equals_sorting(config):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 53)).astype(np.float32) * 2
    logits[30:] = np.round(logits[30:] * 2) / 2  # Many ties.
    logits[5, 10:] = -np.inf
    logits[6] = 1.5
    got = np.asarray(process_logits(jnp.asarray(logits).reshape(3, 20, 53), config))
    with np.errstate(divide="ignore"):
        want = np.maximum(oracle(logits, config), REMOVED)
    np.testing.assert_array_equal(got.reshape(60, 53) == REMOVED, want == REMOVED)
    np.testing.assert_allclose(got.reshape(60, 53), want, atol=2e-5)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1, atol=1e-6)
    assert got.dtype == np.float32


def test_ties_go_to_the_lowest_ids():
    flat = jnp.zeros((1, 8))
    for config, kept in [
        (SamplingConfig(temperature=0.0), 1),
        (SamplingConfig(top_k=3), 3),
        (SamplingConfig(top_p=0.5), 4),
        (SamplingConfig(top_p=0.51), 5),
        (SamplingConfig(top_k=4, top_p=0.5), 2),
    ]:
        probs = np.exp(process_logits(flat, config))[0]
        want = np.where(np.arange(8) < kept, 1 / kept, 0.0)
        np.testing.assert_allclose(probs, want, atol=1e-6)
    # Three ties of which two are needed, between a larger and a smaller token.
    logits = jnp.log(jnp.array([[0.125, 0.25, 0.125, 0.25, 0.25]]))
    keep = process_logits(logits, SamplingConfig(top_p=0.5)) > REMOVED
    assert keep.tolist() == [[False, True, False, True, False]]


def test_a_large_vocabulary():
    logits = np.random.default_rng(1).normal(size=(2, 50_000)).astype(np.float32) * 4
    config = SamplingConfig(top_p=0.9)
    got = np.asarray(process_logits(jnp.asarray(logits), config))
    want = oracle(logits, config)
    assert abs((got > REMOVED).sum() - (want > REMOVED).sum()) <= 1
    np.testing.assert_allclose(np.exp(got), np.exp(want), atol=1e-5)


def test_no_pass_over_the_vocabulary_is_spent_on_settings_that_are_off():
    def equations(config):
        text = str(jax.make_jaxpr(lambda x: process_logits(x, config))(jnp.zeros((2, 8))))
        return {name: name in text for name in ("while", "scan", "sort", "top_k", "cond")}

    assert not any(equations(SamplingConfig(temperature=0.7)).values())
    assert equations(SamplingConfig(top_k=2, top_p=0.5))["top_k"]
    assert not equations(SamplingConfig(top_p=0.5))["sort"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0)]
    + [("top_p", 1.5), ("min_p", -0.1), ("min_p", 2.0)],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must .*{value}"):
        SamplingConfig(**{name: value})


def sparse_weights(vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    weights = np.exp(rng.normal(size=(3000, vocab)) * 6).astype(np.float32)
    weights[rng.random(weights.shape) < rng.random((3000, 1))] = 0
    weights[:, -40:] *= rng.random((3000, 1)) < 0.3
    weights[np.arange(3000), rng.integers(0, vocab, 3000)] = 1.0
    return weights


def landings_on_nothing(vocab: int) -> int:
    weights = sparse_weights(vocab)
    rng = np.random.default_rng(3)
    edges = np.array([0.0, 1 - 2**-24, 1 - 2**-23, 0.5], np.float32)
    missed = 0
    for u in (rng.random((3000, 2)).astype(np.float32), rng.choice(edges, (3000, 2))):
        ids = np.asarray(sample(jnp.asarray(weights), jnp.asarray(u)))
        assert ids.min() >= 0 and ids.max() < vocab
        missed += (weights[np.arange(3000), ids] == 0).sum()
    return missed


@pytest.mark.parametrize("vocab", [5, 256, 700])
def test_a_draw_never_lands_on_a_token_without_weight(vocab):
    assert landings_on_nothing(vocab) == 0


def test_plain_inversion_would_land_there(monkeypatch):
    def plain(weights, uniform):
        total = jnp.cumsum(weights, axis=-1)
        return jnp.argmax(total >= uniform[:, None] * total[:, -1:], axis=-1)

    monkeypatch.setattr(sampling, "_invert", plain)
    assert landings_on_nothing(700) > 0


def test_draws_follow_the_weights():
    vocab, rows = 600, 200_000
    weights = np.random.default_rng(0).random(vocab).astype(np.float32) ** 3
    weights[250:260] = 0  # Across the edge of a block.
    log_probs = jnp.log(jnp.asarray(weights / weights.sum()))
    keys = row_keys(jax.random.key(0), jnp.arange(rows), jnp.full(rows, 7))
    # One row of weights for all draws: broadcasting inside the call keeps it small.
    ids = jax.jit(
        lambda u: jax.lax.map(
            lambda part: sample(jnp.broadcast_to(jnp.exp(log_probs), (2000, vocab)), part),
            u.reshape(-1, 2000, 2),
        )
    )(uniforms(keys, 2))
    counts = np.bincount(np.asarray(ids).ravel(), minlength=vocab)
    expected = rows * np.exp(np.asarray(log_probs, np.float64))
    assert counts[weights == 0].sum() == 0
    often = expected > 5
    chi2 = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[often].sum()
    dof = often.sum() - 1
    assert abs(chi2 - dof) < 5 * np.sqrt(2 * dof)


def test_a_row_draws_the_same_wherever_it_stands():
    log_probs = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (6, 40)))
    rows, positions = jnp.array([4, 9, 2, 7, 0, 5]), jnp.array([3, 0, 8, 3, 1, 1])
    key = jax.random.key(5)
    tokens = draw(log_probs, row_keys(key, rows, positions))
    order = jnp.array([5, 3, 0])
    part = draw(log_probs[order], row_keys(key, rows[order], positions[order]))
    np.testing.assert_array_equal(tokens[order], part)


def test_no_two_draws_share_their_numbers():
    rows, positions = (a.ravel() for a in jnp.meshgrid(jnp.arange(8), jnp.arange(8)))
    keys = row_keys(jax.random.key(0), rows, positions)
    numbers = [
        uniforms(purpose_keys(keys, purpose, index), 3) for purpose in Purpose for index in range(3)
    ]
    numbers = np.stack(numbers)
    assert np.unique(numbers).size > 0.999 * numbers.size
    by_purpose = np.corrcoef(numbers.reshape(len(numbers), -1))
    assert np.abs(by_purpose - np.eye(len(numbers))).max() < 0.3
