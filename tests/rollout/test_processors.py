import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout import sampling
from jaxspec.rollout.processors import REMOVED, SamplingConfig, process_logits
from jaxspec.rollout.sampling import Purpose, draw, purpose_keys, row_keys, sample, uniforms

CONFIGS = [
    SamplingConfig(temperature=0.0, top_k=3),
    SamplingConfig(temperature=0.5, top_k=500),
    SamplingConfig(top_k=1),
    SamplingConfig(top_k=7),
    SamplingConfig(temperature=2.0, top_p=0.93),
    SamplingConfig(min_p=0.07),
    SamplingConfig(top_p=0.01, min_p=0.11),
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
    process = jax.jit(process_logits, static_argnums=1)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 53)).astype(np.float32) * 2
    logits[30:] = np.round(logits[30:] * 2) / 2  # Many ties.
    logits[5, 10:] = -np.inf
    logits[6] = 1.5
    got = np.asarray(process(logits.reshape(3, 20, 53), config))
    with np.errstate(divide="ignore"):
        want = np.maximum(oracle(logits, config), REMOVED)
    np.testing.assert_array_equal(got.reshape(60, 53) == REMOVED, want == REMOVED)
    np.testing.assert_allclose(got.reshape(60, 53), want, atol=2e-5)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1, atol=1e-6)
    assert got.dtype == np.float32


def test_ties_go_to_the_lowest_ids():
    process = jax.jit(process_logits, static_argnums=1)
    # Flat; then four ties of which two are needed, between a larger token and smaller ones.
    probs = np.array([[1] * 8, [1, 2, 1, 2, 4, 2, 2, 2]], np.float32) / 8
    for config in (SamplingConfig(top_p=0.5), SamplingConfig(top_k=5, top_p=0.6)):
        keep = np.asarray(process(np.log(probs), config)) > REMOVED
        flat, mixed = (np.flatnonzero(row).tolist() for row in keep)
        assert flat == ([0, 1, 2, 3] if config.top_k == 0 else [0, 1, 2])
        assert mixed == ([1, 3, 4] if config.top_k == 0 else [1, 3, 4])


def test_a_large_vocabulary():
    logits = np.random.default_rng(1).normal(size=(2, 50_000)).astype(np.float32) * 4
    config = SamplingConfig(top_p=0.9)
    got = np.asarray(jax.jit(process_logits, static_argnums=1)(logits, config))
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
    land = jax.jit(lambda weights, u: sampling.sample(weights, u))
    for u in (rng.random((3000, 2)).astype(np.float32), rng.choice(edges, (3000, 2))):
        ids = np.asarray(land(weights, u))
        assert ids.min() >= 0 and ids.max() < vocab
        missed += (weights[np.arange(3000), ids] == 0).sum()
    return missed


@pytest.mark.parametrize("vocab", [5, 700])
def test_a_draw_never_lands_on_a_token_without_weight(vocab):
    assert landings_on_nothing(vocab) == 0


def test_nor_when_sums_round_in_any_order(monkeypatch):
    """Some devices sum in a tree, where a sum may change, either way, over a zero weight."""
    exact = jnp.cumsum

    def uneven(weights, axis):
        sign = jnp.where(jnp.arange(weights.shape[axis]) % 2 == 0, -1, 1)
        return exact(weights, axis=axis) * (1 + 0.02 * sign)

    monkeypatch.setattr(jnp, "cumsum", uneven)
    assert landings_on_nothing(700) == 0


def test_plain_inversion_would_land_there(monkeypatch):
    def plain(weights, uniform):
        total = jnp.cumsum(weights, axis=-1)
        return jnp.argmax(total >= uniform[:, None] * total[:, -1:], axis=-1)

    monkeypatch.setattr(sampling, "_invert", plain)
    assert landings_on_nothing(700) > 0


def test_draws_follow_the_weights():
    vocab, rows = 600, 50_000
    weights = np.random.default_rng(0).random(vocab).astype(np.float32) ** 3
    weights[250:260] = 0  # Across the edge of a block.

    @jax.jit
    def draws(key):
        def some(positions):
            keys = row_keys(key, jnp.arange(2000), jnp.broadcast_to(positions, 2000))
            return sample(jnp.broadcast_to(weights, (2000, vocab)), uniforms(keys, 2))

        return jax.lax.map(some, jnp.arange(rows // 2000))

    counts = np.bincount(np.asarray(draws(jax.random.key(0))).ravel(), minlength=vocab)
    expected = rows * weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert counts[weights == 0].sum() == 0
    often = expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    dof = often.sum() - 1
    assert abs(chi2 - dof) < 5 * np.sqrt(2 * dof)


def test_a_row_draws_the_same_wherever_it_stands():
    @jax.jit
    def tokens(log_probs, rows, positions):
        return draw(jax.nn.log_softmax(log_probs), row_keys(jax.random.key(5), rows, positions))

    rng = np.random.default_rng(0)
    log_probs = rng.normal(size=(6, 40)).astype(np.float32)
    rows, positions = np.array([4, 9, 2, 7, 0, 5]), np.array([3, 0, 8, 3, 1, 1])
    order = np.array([5, 3, 0, 1, 4, 2])
    straight = np.asarray(tokens(log_probs, rows, positions))
    shuffled = np.asarray(tokens(log_probs[order], rows[order], positions[order]))
    np.testing.assert_array_equal(straight[order], shuffled)
    later = np.asarray(tokens(log_probs, rows, positions + 1))
    assert (later != straight).any()


def test_no_two_draws_share_their_numbers():
    @jax.jit
    def numbers(key):
        rows, positions = (a.ravel() for a in jnp.meshgrid(jnp.arange(8), jnp.arange(8)))
        keys = row_keys(key, rows, positions)
        draws = [(purpose, index) for purpose in Purpose for index in range(2)]
        return jnp.stack([uniforms(purpose_keys(keys, *one), 3).ravel() for one in draws])

    got = np.asarray(numbers(jax.random.key(0)))
    assert np.unique(got).size > 0.999 * got.size
    assert np.abs(np.corrcoef(got) - np.eye(len(got))).max() < 0.3
