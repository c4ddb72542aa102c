"""Policy losses against textbook loops in float64, gradients by finite differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import compat
from jaxspec.rl import losses
from jaxspec.rl.losses import LossConfig, policy_loss

BATCH, TIME = 2, 12
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 0], [7, 7, 7, 7, 7, 7, 9, 9, 9, 0, 0, 0]])
MASK = np.array([[0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]], bool)


def case(seed=0):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=(BATCH, TIME))
    return {
        "logprobs": logprobs,
        "behaviour_logprobs": logprobs + rng.normal(size=(BATCH, TIME)) * 0.5,
        "old_logprobs": logprobs + rng.normal(size=(BATCH, TIME)) * 0.3,
        "reference_logprobs": logprobs + rng.normal(size=(BATCH, TIME)),
        "advantages": rng.normal(size=10)[SEGMENTS],
        "token_weights": rng.random((BATCH, TIME)),
    }


def replies():
    for row in range(BATCH):
        for segment in sorted(set(SEGMENTS[row]) - {0}):
            where = np.flatnonzero((SEGMENTS[row] == segment) & MASK[row])
            if len(where):
                yield row, where


def oracle(config, data, logprobs):
    """Loops over replies; `data["logprobs"]` stays fixed where the gradient is stopped."""
    fixed, behaviour = data["logprobs"], data["behaviour_logprobs"]
    old = data.get("old_logprobs")
    if old is None:
        old = fixed if config.on_policy else behaviour
    total = 0.0
    for row, where in replies():
        log_ratio = [logprobs[row, t] - old[row, t] for t in where]
        mismatch = [old[row, t] - behaviour[row, t] for t in where]
        if config.kind == "gspo":
            log_ratio = [sum(log_ratio) / len(where)] * len(where)
            mismatch = [sum(mismatch) / len(where)] * len(where)
        for t, a, b in zip(where, log_ratio, mismatch, strict=True):
            ratio, advantage = math.exp(a), data["advantages"][row, t]
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            objective = min(ratio * advantage, clipped * advantage)
            if config.dual_clip is not None and advantage < 0:
                objective = max(objective, config.dual_clip * advantage)
            if config.importance_cap is not None:
                objective *= min(math.exp(b), config.importance_cap)
            loss = -objective
            if config.kl_coefficient:
                x = data["reference_logprobs"][row, t] - logprobs[row, t]
                loss += config.kl_coefficient * (math.exp(x) - x - 1)
            total += data["token_weights"][row, t] * loss
    return total


def finite_differences(config, data, step=1e-6):
    grad = np.zeros((BATCH, TIME))
    for index in np.ndindex(BATCH, TIME):
        up, down = data["logprobs"].copy(), data["logprobs"].copy()
        up[index] += step
        down[index] -= step
        grad[index] = (oracle(config, data, up) - oracle(config, data, down)) / (2 * step)
    return grad


def loss_and_grad(config, data, **extra):
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in data.items()}
    logprobs = arrays.pop("logprobs")
    arrays |= {"mask": jnp.asarray(MASK), "segment_ids": jnp.asarray(SEGMENTS, jnp.int32)} | extra

    def scalar(logprobs):
        return policy_loss(config, logprobs, **arrays)

    (loss, metrics), grad = jax.jit(jax.value_and_grad(scalar, has_aux=True))(logprobs)
    return loss, grad, metrics


def check(config, data):
    loss, grad, _ = loss_and_grad(config, data)
    np.testing.assert_allclose(loss, oracle(config, data, data["logprobs"]), rtol=1e-5)
    np.testing.assert_allclose(grad, finite_differences(config, data), atol=2e-5)
    assert not np.asarray(grad)[~MASK].any()
    return np.asarray(grad)


def without(data, *names):
    return {name: value for name, value in data.items() if name not in names}


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
@pytest.mark.parametrize("mode", ["on_policy", "behaviour_is_old", "old_given"])
def test_textbook(kind, mode):
    data = case() if mode == "old_given" else without(case(), "old_logprobs")
    config = LossConfig(
        kind=kind,
        on_policy=mode == "on_policy",
        clip_low=0.1,
        clip_high=0.15,
        dual_clip=1.3,
        importance_cap=1.1 if mode != "behaviour_is_old" else None,
        kl_coefficient=0.3,
    )
    assert check(config, data)[MASK].any()


def test_behaviour_as_old_policy_needs_no_importance_weight():
    data = without(case(), "old_logprobs")
    capped = loss_and_grad(LossConfig(on_policy=False, importance_cap=1.0), data)
    free = loss_and_grad(LossConfig(on_policy=False, importance_cap=None), data)
    np.testing.assert_array_equal(capped[1], free[1])
    assert "importance_weight" not in capped[2]


def test_swapped_clips_are_seen(monkeypatch):
    config = LossConfig(clip_low=0.05, clip_high=0.6, on_policy=False, importance_cap=None)
    data = without(case(), "old_logprobs")
    check(config, data)
    swapped = LossConfig(clip_low=0.6, clip_high=0.05)
    right = losses.clipped_surrogate
    monkeypatch.setattr(losses, "clipped_surrogate", lambda r, a, _: right(r, a, swapped))
    with pytest.raises(AssertionError):
        check(config, data)


def test_metrics():
    data = case(6)
    config = LossConfig(on_policy=False, dual_clip=1.25, importance_cap=1.1)
    entropy = jnp.where(MASK, 2.0, jnp.nan)
    _, _, metrics = loss_and_grad(config, data, entropy=entropy)
    got = {name: float(total / count) for name, (total, count) in metrics.items()}
    picked = {name: value[MASK] for name, value in data.items()}
    ratio = np.exp(picked["logprobs"] - picked["old_logprobs"])
    mismatch = np.exp(picked["old_logprobs"] - picked["behaviour_logprobs"])
    drift = picked["logprobs"] - picked["behaviour_logprobs"]
    reference = picked["reference_logprobs"] - picked["logprobs"]
    positive = picked["advantages"] > 0
    want = {
        "ratio": ratio.mean(),
        "clip_fraction_low": np.mean((ratio < 0.8) & ~positive),
        "clip_fraction_high": np.mean((ratio > 1.2) & positive),
        "clip_fraction_dual": np.mean((ratio > 1.25) & ~positive),
        "importance_weight": np.minimum(mismatch, 1.1).mean(),
        "importance_capped": np.mean(mismatch > 1.1),
        "kl_behaviour": np.mean(np.exp(drift) - 1 - drift),
        "kl_reference": np.mean(np.exp(reference) - 1 - reference),
        "max_log_ratio": np.abs(drift).max(),
        "entropy": 2.0,
    }
    assert got == pytest.approx(want, abs=1e-5)
    assert all(want[f"clip_fraction_{side}"] > 0 for side in ("low", "high", "dual"))
    counts = {name: float(count) for name, (_, count) in metrics.items()}
    assert counts.pop("max_log_ratio") == 1 and set(counts.values()) == {MASK.sum()}
    assert set(losses.MAXIMA) <= set(metrics)


def test_masked_tokens_hold_anything():
    config = LossConfig(kind="gspo", kl_coefficient=0.1, on_policy=False)
    data = case()
    clean = loss_and_grad(config, data)
    for fill, name in zip((np.nan, -np.inf, np.inf, np.nan, np.inf, np.nan), data, strict=True):
        data[name] = np.where(MASK, data[name], fill)
    dirty = loss_and_grad(config, data)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_no_tokens():
    loss, grad, metrics = loss_and_grad(
        LossConfig(on_policy=False), case(), mask=jnp.zeros((BATCH, TIME), bool)
    )
    assert loss == 0 and not np.asarray(grad).any()
    assert all(total == 0 and count == 0 for total, count in metrics.values())


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_on_policy_ratio_is_exactly_one(kind):
    data = without(case(), "old_logprobs", "reference_logprobs")
    _, grad, metrics = loss_and_grad(LossConfig(kind=kind, importance_cap=None), data)
    assert metrics["ratio"][0] == MASK.sum()
    want = -data["advantages"] * data["token_weights"]
    if kind == "gspo":
        for row, where in replies():
            want[row, where] = want[row, where].mean()
    np.testing.assert_allclose(grad, want * MASK, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_equal_rewards_move_nothing_without_a_reference(kind):
    data = without(case(), "reference_logprobs")
    data["advantages"] = np.zeros((BATCH, TIME))
    loss, grad, _ = loss_and_grad(LossConfig(kind=kind, on_policy=False), data)
    assert loss == 0 and not np.asarray(grad).any()


@pytest.mark.parametrize("kind, ratio", [("grpo", 1), ("gspo", 1), ("dr_grpo", 4), ("dapo", 4)])
def test_length_bias(kind, ratio):
    """Replies of 2 and 8 tokens, equal advantage: 1:1 by sequence, 1:4 by token or constant."""
    segments = np.array([[1] * 2 + [2] * 8])
    lengths = np.array([[2] * 2 + [8] * 8])
    config = LossConfig(kind=kind)
    weights = {"sequence": 1 / lengths, "token": np.ones((1, 10)), "constant": np.ones((1, 10))}
    zeros = jnp.zeros((1, 10))
    grad = jax.jit(
        jax.grad(
            lambda logprobs: policy_loss(
                config,
                logprobs,
                zeros,
                zeros + 1,
                jnp.ones((1, 10), bool),
                jnp.asarray(weights[config.aggregation], jnp.float32),
                jnp.asarray(segments, jnp.int32),
            )[0]
        )
    )(zeros)
    assert float(grad[0, 2:].sum() / grad[0, :2].sum()) == pytest.approx(ratio)


@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_huge_log_ratios_stay_finite(gap):
    zeros = jnp.zeros((1, 2))
    value, grad = jax.value_and_grad(lambda x: losses.kl_k3(x).sum())(zeros + gap)
    assert np.isfinite(value) and np.isfinite(grad).all()
    data = without(case(), "old_logprobs")
    for name in ("behaviour_logprobs", "reference_logprobs"):
        data[name] = data["logprobs"] - gap
    config = LossConfig(on_policy=False, kl_coefficient=1.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loss_and_grad(config, data)))


def test_k3_is_flat_where_the_policies_agree():
    value, grad = jax.value_and_grad(lambda x: losses.kl_k3(x).sum())(jnp.zeros((1, 3)))
    assert value == 0 and not np.asarray(grad).any()


@pytest.mark.parametrize("shards", [4])
def test_gspo_with_tokens_over_devices(shards):
    """A reply's mean ratio joins tokens on several devices, and so does its gradient."""
    config = LossConfig(kind="gspo", on_policy=False, clip_low=0.4, clip_high=0.4)
    data = case()
    names = [name for name in data if name != "logprobs"]
    arrays = [jnp.asarray(data[name], jnp.float32) for name in ("logprobs", *names)]
    mesh = compat.make_mesh((shards,), ("context",), jax.devices()[:shards])

    def local(logprobs, mask, segment_ids, *rest):
        def scalar(logprobs):
            return policy_loss(
                config,
                logprobs,
                mask=mask,
                segment_ids=segment_ids,
                context_axis="context",
                **dict(zip(names, rest, strict=True)),
            )[0]

        loss, grad = jax.value_and_grad(scalar)(logprobs)
        return jax.lax.psum(loss, "context"), grad

    token = P(None, "context")
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(token,) * 8, out_specs=(P(), token), check_vma=True
    )
    mask, segments = jnp.asarray(MASK), jnp.asarray(SEGMENTS, jnp.int32)
    loss, grad = jax.jit(step)(arrays[0], mask, segments, *arrays[1:])
    np.testing.assert_allclose(loss, oracle(config, data, data["logprobs"]), rtol=1e-5)
    np.testing.assert_allclose(grad, finite_differences(config, data), atol=2e-5)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kind": "ppo"}, "LossConfig.kind is 'ppo'; known kinds are"),
        ({"clip_low": 0.0}, "LossConfig.clip_low is 0.0"),
        ({"clip_low": 1.5}, "LossConfig.clip_low is 1.5"),
        ({"clip_high": -0.1}, "LossConfig.clip_high is -0.1"),
        ({"clip_high": math.nan}, "LossConfig.clip_high is nan"),
        ({"dual_clip": 1.1}, r"LossConfig.dual_clip is 1.1; it must be above 1 \+ clip_high = 1.2"),
        ({"kl_coefficient": -1.0}, "LossConfig.kl_coefficient is -1.0"),
        ({"importance_cap": 0.5}, "LossConfig.importance_cap is 0.5; it must be at least 1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


def test_log_probabilities_that_contradict_the_settings():
    with pytest.raises(ValueError, match="on_policy=True"):
        loss_and_grad(LossConfig(), case())
    data = without(case(), "old_logprobs", "reference_logprobs")
    with pytest.raises(ValueError, match="kl_coefficient is 0.1 and there are no reference"):
        loss_and_grad(LossConfig(kl_coefficient=0.1), data)
