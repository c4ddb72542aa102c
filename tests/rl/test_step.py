"""One co-training step: equal however it is split, and exact against dense float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.attention import reference, spec
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.mesh import MeshConfig, make_mesh
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import PackingConfig, Sample
from jaxspec.params import init_params, place_params
from jaxspec.rl.losses import LossConfig
from jaxspec.rl.state import init_state
from jaxspec.rl.step import StepConfig, make_rl_step
from jaxspec.training.batches import build_microbatches

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    tie_word_embeddings=True,
)
DRAFT = Eagle3(
    Eagle3Config.from_policy(MODEL, num_passes=2, tap_layers=(0, 1, 2), draft_vocab_size=16)
)
SGD = optax.sgd(1.0)
LOSS = LossConfig(kind="dapo", importance_cap=2.0)


def make_samples():
    rng = np.random.default_rng(0)
    samples = []
    for group, length in enumerate((3, 6, 5)):
        prompt = rng.integers(0, 23, length)
        for size in rng.integers(1, 9, 4):
            samples.append(
                Sample(
                    prompt=prompt,
                    reply=rng.integers(0, 23, size),
                    logprobs=rng.uniform(-3.2, -3.0, size),
                    advantage=rng.normal(),
                    group=group,
                )
            )
    return samples


SAMPLES = make_samples()
DENOMINATOR = float(sum(len(s.reply) for s in SAMPLES))


@pytest.fixture(scope="module")
def start():
    params = jax.tree.map(np.asarray, init_params(policy.param_table(MODEL), jax.random.key(0)))
    params["embed"] = params["embed"] * 20
    on_device = jax.tree.map(jnp.asarray, params)
    weights = DRAFT.init(jax.random.key(1), on_device, np.arange(16))
    return params, jax.tree.map(np.asarray, weights)


def update(
    start,
    *,
    devices=1,
    rows_per_microbatch=8,
    packed=True,
    share=True,
    samples=SAMPLES,
    draft=DRAFT,
    config=None,
    batch_map=lambda batch: batch,
    **kwargs,
):
    """Takes one step of plain gradient descent; returns parameters, metrics and state."""
    optimizers = (SGD, SGD)
    params, weights = start
    mesh = make_mesh(MeshConfig(data=devices))
    table = policy.param_table(MODEL)
    placed = place_params(table, params, mesh)
    draft_fields = {}
    if draft is not None:
        frozen = dataclasses.replace(
            weights, params=place_params(draft.param_table(), weights.params, mesh)
        )
        draft_fields = {
            "draft_weights": frozen,
            "draft_table": draft.param_table(),
            "draft_optimizer": optimizers[1],
        }
    state = init_state(jax.random.key(0), placed, table, optimizers[0], mesh, **draft_fields)
    packing = PackingConfig(
        row_length=40, rows_per_microbatch=rows_per_microbatch, packed=packed, share_prompts=share
    )
    batch = build_microbatches(
        samples, packing, num_ahead=DRAFT.num_ahead, capacity=len(samples), mesh=mesh
    )
    step = make_rl_step(
        MODEL, draft, config or StepConfig(loss=LOSS), optimizers[0], optimizers[1], mesh
    )
    state, metrics = step(
        state,
        batch_map(batch.batch),
        jnp.asarray(batch.used, jnp.int32),
        jnp.float32(DENOMINATOR),
        **kwargs,
    )
    new = {"policy": state.policy.params}
    if draft is not None:
        new["draft"] = state.draft.params
    return jax.tree.map(np.asarray, new), jax.device_get(metrics), state


def assert_close(a, b, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def baseline(start):
    return update(start)


SPLITS = [
    {"devices": 8, "rows_per_microbatch": 8},
    {"devices": 2, "rows_per_microbatch": 2},
    {"rows_per_microbatch": 1, "share": False},
    {"packed": False, "rows_per_microbatch": 4, "devices": 4},
    {"samples": SAMPLES[::-1]},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_split_does_not_matter(start, baseline, split):
    new, metrics, _ = update(start, **split)
    assert_close(new, baseline[0])
    for name, (numerator, denominator) in baseline[1].items():
        if "grad_norm" in name:
            continue
        np.testing.assert_allclose(metrics[name][0], numerator, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(metrics[name][1], denominator, rtol=1e-5, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_every_split_gives_the_same_update(start, baseline, devices, microbatches, packed):
    rows = max(devices, 8 // microbatches)
    new, _, _ = update(start, devices=devices, rows_per_microbatch=rows, packed=packed)
    assert_close(new, baseline[0])


def test_a_missing_sum_over_devices_would_be_seen(start, baseline, monkeypatch):
    # Each device then divides the draft's loss by the count of its own rows, nearly.
    def half(tree):
        total = jax.lax.psum(tree, "data")
        return total if isinstance(tree, dict) else total / 2

    monkeypatch.setattr("jaxspec.rl.step.sum_over_data", half)
    new, _, _ = update(start, devices=2, rows_per_microbatch=2)
    with pytest.raises(AssertionError):
        assert_close(new, baseline[0])


def test_policy_update_is_the_same_with_and_without_a_draft(start, baseline):
    alone, _, _ = update(start, draft=None)
    heavy, _, _ = update(start, config=StepConfig(loss=LOSS, draft_weight=1e6))
    for other in (alone, heavy):
        for x, y in zip(
            jax.tree.leaves(other["policy"]), jax.tree.leaves(baseline[0]["policy"]), strict=True
        ):
            np.testing.assert_array_equal(x, y)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), heavy["draft"], start[1].params)
    assert min(jax.tree.leaves(moved)) > 1


def dense_loss(params, samples):
    """The policy loss in the textbook's form: one document at a time, whole softmaxes, float64."""
    total = 0.0
    for sample in samples:
        tokens = jnp.asarray(np.concatenate([sample.prompt, sample.reply]))[None]
        positions = jnp.arange(tokens.shape[1])[None]
        intervals = spec.causal_intervals(jnp.ones_like(tokens, jnp.int32), positions)
        out = policy.forward(
            params,
            MODEL,
            tokens,
            positions,
            lambda q, k, v, i=intervals: reference.attend(q, k, v, i)[0],
            compute_dtype="float64",
        )
        logits = out.hidden[0] @ policy.head(params).T
        first = len(sample.prompt) - 1
        logp = jax.nn.log_softmax(logits)[first:-1]
        logp = logp[jnp.arange(len(sample.reply)), sample.reply]
        weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logp) - sample.logprobs), 2.0)
        ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
        total += -jnp.sum(ratio * weight * sample.advantage)
    return total / DENOMINATOR


def test_policy_gradient_is_the_textbooks(start, baseline):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), start[0])
        differentiate = jax.jit(jax.grad(lambda params: dense_loss(params, SAMPLES)))
        gradient = jax.tree.map(np.asarray, differentiate(params))
    want = jax.tree.map(lambda p, g: p - g, start[0], gradient)
    assert_close(baseline[0]["policy"], want, atol=2e-6)


def test_nonfinite_update_changes_nothing_and_is_counted(start):
    spoil = lambda batch: batch.replace(advantages=batch.advantages.at[0, 0, 10:].set(jnp.nan))  # noqa: E731
    new, metrics, state = update(start, batch_map=spoil)
    assert_close(new["policy"], start[0], atol=0)
    assert_close(new["draft"], start[1].params, atol=0)
    assert int(state.nonfinite_in_a_row) == 1 and int(state.step) == 1
    assert metrics["skipped_updates"][0] == 1


def test_frozen_draft_is_scored_on_the_same_rows(start, baseline):
    weights = jax.tree.map(jnp.asarray, start[1])
    new, metrics, _ = update(start, frozen_draft=weights)
    for name in ("draft_loss", "expected_acceptance_length"):
        np.testing.assert_allclose(metrics[f"frozen_{name}"], metrics[name], rtol=1e-6)
    assert_close(new, baseline[0], atol=0)


def test_draft_can_rest(start, baseline):
    new, _, _ = update(start, update_draft=False)
    assert_close(new["policy"], baseline[0]["policy"], atol=0)
    assert_close(new["draft"], start[1].params, atol=0)
