"""EAGLE-3 folders: what is written, what it means, and other layouts of the same draft."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_drafts import (
    CONFIG,
    D2T,
    EMBEDDING,
    IDS,
    SHAPES,
    TARGET,
    assert_same,
    load,
    random_weights,
    store,
)

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.io import draft_formats
from jaxspec.io.draft_formats import eagle3_config, read_eagle3, write_eagle3
from jaxspec.models.config import ModelConfig, RopeScaling


def to_speculators(config, tensors, embedding=EMBEDDING):
    """What speculators writes for the same draft (its own names, ids of layer inputs)."""
    eagle = config["eagle_config"]
    layer = {
        k: v
        for k, v in config.items()
        if k not in ("eagle_config", "draft_vocab_size", "norm_before_residual", "norm_before_fc")
    }
    out = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        "norm_before_fc": config["norm_before_fc"],
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [
            i + 1 for i in eagle["eagle_aux_hidden_state_layer_ids"]
        ],
        "transformer_layer_config": layer,
    }
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    return out, renamed | {"embed_tokens.weight": embedding.astype(tensors["norm.weight"].dtype)}


def rms(x, w, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def file_logits(t, taps, tokens, *, before_residual=False, before_fc=False):
    """The draft's first pass written from the file's tensors alone, last row, float64."""
    t = {k: v.astype(np.float64) for k, v in t.items()}
    p = "midlayer."
    rows, hd = len(tokens), 4
    h = (rms(taps, t["input_norm.weight"]) if before_fc else taps) @ t["fc.weight"].T
    normed = rms(h, t[p + "hidden_norm.weight"])
    x = np.concatenate([rms(EMBEDDING[tokens], t[p + "input_layernorm.weight"]), normed], -1)
    angle = np.arange(rows)[:, None] * 5000.0 ** (-np.arange(0, hd, 2) / hd)
    cos, sin = (np.tile(f(angle), 2)[:, None] for f in (np.cos, np.sin))

    def heads(name, turn=True):
        y = (x @ t[f"{p}self_attn.{name}_proj.weight"].T).reshape(rows, -1, hd)
        return y * cos + np.concatenate([-y[..., 2:], y[..., :2]], -1) * sin if turn else y

    q, k, v = heads("q"), heads("k")[:, 0], heads("v", False)[:, 0]
    score = np.einsum("hd,kd->hk", q[-1], k) / np.sqrt(hd)
    weight = np.exp(score - score.max(-1, keepdims=True))
    attended = (weight / weight.sum(-1, keepdims=True)) @ v
    y = (normed if before_residual else h)[-1]
    y = y + attended.reshape(-1) @ t[p + "self_attn.o_proj.weight"].T
    m = rms(y, t[p + "post_attention_layernorm.weight"])
    gate = m @ t[p + "mlp.gate_proj.weight"].T
    up = m @ t[p + "mlp.up_proj.weight"].T
    y = y + (gate / (1 + np.exp(-gate)) * up) @ t[p + "mlp.down_proj.weight"].T
    return rms(y, t["norm.weight"]) @ t["lm_head.weight"].T


@functools.partial(jax.jit, static_argnums=0)
def commit_logits(config, weights, taps, tokens, count):
    draft = Eagle3(config)
    state = draft.new_state(1, len(tokens), "float32")
    start = jnp.zeros(1, jnp.int32)
    state = draft.commit(
        weights, jnp.asarray(EMBEDDING), state, tokens[None], taps[None], start, count[None]
    )
    return draft.logits(weights.params, state.hidden, "float32")[0]


def our_logits(config, weights, taps, tokens):
    rows = len(tokens)
    tokens = np.pad(tokens, (0, 6 - rows)).astype(np.int32)  # one shape, one compilation
    taps = np.pad(taps, ((0, 6 - rows), (0, 0))).astype(np.float32)
    return np.asarray(commit_logits(config, weights, taps, tokens, np.int32(rows)))


# --- the file


def test_keys_shapes_dtypes_and_flags(tmp_path):
    write_eagle3(tmp_path / "draft", CONFIG, random_weights(CONFIG), TARGET)
    assert sorted(os.listdir(tmp_path)) == ["draft"]  # nothing half-written stays
    config, tensors = load(tmp_path / "draft")
    assert {k: v.shape for k, v in tensors.items()} == SHAPES
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    others = {v.dtype.name for k, v in tensors.items() if k not in ("d2t", "t2d")}
    assert others == {"bfloat16"}
    assert tensors["d2t"].tolist() == D2T and np.flatnonzero(tensors["t2d"]).tolist() == [*IDS]
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "use_aux_hidden_state": True,
        "norm_before_fc": False,
    }
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 10,
        "target_hidden_size": 10,
        "intermediate_size": 14,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "vocab_size": 19,
        "draft_vocab_size": 7,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 256,  # the target's
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,  # though the target's are tied
        "torch_dtype": "bfloat16",
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "num_aux_hidden_states": 3,
    }
    assert {k: config.get(k, "absent") for k in expected} == expected
    assert "norm_output" not in config  # its two readings contradict each other


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"draft_vocab_size": 19, "tap_layers": (6,)},
    ],
    ids=["plain", "norm_before_residual", "norm_before_fc", "whole_vocabulary"],
)
def test_the_file_means_what_our_draft_computes(tmp_path, change):
    config = dataclasses.replace(CONFIG, **change)
    weights = random_weights(config)
    write_eagle3(tmp_path / "d", config, weights, TARGET, dtype="float32")
    back_config, back = read_eagle3(tmp_path / "d", TARGET)
    assert back_config == dataclasses.replace(config, max_position_embeddings=256)
    assert_same(back, weights)
    _, tensors = load(tmp_path / "d")
    assert ("d2t" in tensors) == (config.draft_vocab_size == 7)
    rng = np.random.default_rng(1)
    flags = {
        "before_residual": config.norm_before_residual,
        "before_fc": config.norm_before_fc,
    }
    for rows in (1, 4, 6):
        taps = rng.normal(size=(rows, 10 * len(config.tap_layers)))
        tokens = rng.integers(0, 19, rows)
        expected = file_logits(tensors, taps, tokens, **flags)
        np.testing.assert_allclose(
            our_logits(back_config, back, taps, tokens), expected, atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("pair", [("gate", "up"), ("k", "v"), ("input_norm", "hidden_norm")])
def test_names_that_are_swapped_would_be_seen(tmp_path, monkeypatch, pair):
    """Reader and writer agree on swapped names; only the independent forward pass notices."""
    a, b = pair
    names = draft_formats.NAMES
    swapped = names | {a: names[b], b: names[a]}
    monkeypatch.setattr(draft_formats, "NAMES", swapped)
    weights = random_weights(CONFIG)
    config = dataclasses.replace(CONFIG, max_position_embeddings=256)
    write_eagle3(tmp_path / "d", config, weights, TARGET, dtype="float32")
    assert_same(read_eagle3(tmp_path / "d", TARGET)[1], weights)
    rng = np.random.default_rng(1)
    taps, tokens = rng.normal(size=(4, 30)), rng.integers(0, 19, 4)
    theirs = file_logits(load(tmp_path / "d")[1], taps, tokens)
    assert np.abs(our_logits(config, weights, taps, tokens) - theirs).max() > 1e-2


def test_bfloat16_file_reads_back_as_rounded(tmp_path):
    weights = random_weights(CONFIG)
    write_eagle3(tmp_path / "a", CONFIG, weights, TARGET)
    config, back = read_eagle3(tmp_path / "a", TARGET)
    for name, value in back.params.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, weights.params[name], rtol=2**-8)
    # A second trip changes no bit.
    write_eagle3(tmp_path / "b", config, back, TARGET)
    assert_same(read_eagle3(tmp_path / "b", TARGET)[1], back)


def test_engines_map_draft_rows_to_our_ids(tmp_path):
    weights = random_weights(CONFIG)
    write_eagle3(tmp_path / "d", CONFIG, weights, TARGET, dtype="float32")
    _, tensors = load(tmp_path / "d")
    logits = np.random.default_rng(3).normal(size=7)
    rows = np.argsort(-logits)[:5]
    ours = IDS[rows]
    hot = tensors["d2t"] + np.arange(7)  # SGLang: an id for each row
    np.testing.assert_array_equal(hot[rows], ours)
    scattered = np.full(19, -np.inf)  # vLLM: logits into the whole vocabulary
    scattered[np.arange(7) + tensors["d2t"]] = logits
    np.testing.assert_array_equal(np.argsort(-scattered)[:5], ours)


# --- other layouts


def test_there_and_back_through_speculators(tmp_path):
    weights = random_weights(CONFIG)
    write_eagle3(tmp_path / "flat", CONFIG, weights, TARGET, dtype="float32")
    spec = store(tmp_path / "spec", *to_speculators(*load(tmp_path / "flat")))
    raw, tensors = load(spec)
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert "layers.0.self_attn.q_proj.weight" in tensors
    config, back = read_eagle3(spec, TARGET, embedding=EMBEDDING)
    assert config.tap_layers == (1, 3, 5)
    assert_same(back, weights)
    write_eagle3(tmp_path / "again", config, back, TARGET, dtype="float32")
    first, second = load(tmp_path / "flat"), load(tmp_path / "again")
    assert first[0] == second[0]
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])


def test_modelopt_and_prefixed_keys(tmp_path):
    weights = random_weights(CONFIG)
    write_eagle3(tmp_path / "flat", CONFIG, weights, TARGET, dtype="float32")
    raw, tensors = load(tmp_path / "flat")
    del tensors["t2d"]
    raw["eagle_config"] |= {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    config, back = read_eagle3(store(tmp_path / "mo", raw, renamed), TARGET)
    assert config.tap_layers == (1, 3, 5)
    assert_same(back, weights)
    prefixed = {k if k == "d2t" else "model." + k: v for k, v in renamed.items()}
    assert_same(read_eagle3(store(tmp_path / "am", raw, prefixed), TARGET)[1], weights)


def test_three_files_that_mean_the_same_layers():
    target = dataclasses.replace(TARGET, num_layers=36)
    flat = draft_formats.eagle3_to_hf(
        dataclasses.replace(CONFIG, tap_layers=(1, 17, 32)), target, "bfloat16"
    )
    top = {k: v for k, v in flat.items() if k != "eagle_config"}
    top["eagle_aux_hidden_state_layer_ids"] = [1, 17, 32]
    spec, _ = to_speculators(flat, {"norm.weight": np.zeros(10, np.float32)})
    silent = {k: v for k, v in flat.items() if k != "eagle_config"}  # the default of the field
    silent_spec = {k: v for k, v in spec.items() if k != "eagle_aux_hidden_state_layer_ids"}
    for raw in (flat, top, spec, silent, silent_spec):
        assert eagle3_config(raw, target, "config.json").tap_layers == (1, 17, 32)
    assert spec["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    # An absent flag is false in the flat layout and true in that of speculators.
    for raw, default in ((flat, False), (spec, True)):
        raw = {k: v for k, v in raw.items() if k != "norm_before_residual"}
        assert eagle3_config(raw, target, "config.json").norm_before_residual is default


def test_rope_scaling_survives(tmp_path):
    scaling = RopeScaling(
        kind="llama3",
        factor=8.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    write_eagle3(tmp_path / "d", config, random_weights(config), TARGET)
    raw, _ = load(tmp_path / "d")
    assert raw["rope_scaling"]["rope_type"] == raw["rope_parameters"]["rope_type"] == "llama3"
    assert read_eagle3(tmp_path / "d", TARGET)[0].rope_scaling == scaling


def test_a_published_config_resolves():
    """The fields of the EAGLE-3 draft config that SpecForge publishes for Llama-3.1-8B."""
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    target = ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    config = eagle3_config(raw, target, "config.json")
    assert config.tap_layers == (1, 15, 28) and config.head_dim == 128
    assert config.draft_vocab_size == 32000 and config.max_position_embeddings == 131072
