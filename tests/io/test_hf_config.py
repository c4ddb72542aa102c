"""Hugging Face configurations, there and back, and every refusal."""

import dataclasses
import json

import pytest
from small_policies import FAMILIES, config_of

from jaxspec.io import hf_config
from jaxspec.models.config import ModelConfig, RopeScaling


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=2.5),
        RopeScaling(kind="dynamic", factor=2.0, original_max_position_embeddings=64),
        RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=32),
        RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0),
        RopeScaling(
            kind="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            attention_factor=1.1,
            mscale=0.7,
            mscale_all_dim=0.9,
            truncate=False,
        ),
    ],
)
def test_configuration_round_trip(family, scaling):
    config = config_of(family, rope_scaling=scaling)
    raw = json.loads(json.dumps(hf_config.to_hf(config)))
    assert hf_config.from_hf(raw, "config.json") == config
    older = {k: v for k, v in raw.items() if k != "rope_parameters"}
    newer = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}
    assert hf_config.from_hf(older, "config.json") == config
    assert hf_config.from_hf(newer, "config.json") == config


def test_published_llama_3_3():
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }
    assert hf_config.from_hf(raw, "config.json") == ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_qwen3():
    config = hf_config.from_hf(QWEN3_8B, "config.json")
    assert (config.family, config.qk_norm, config.qkv_bias) == ("qwen3", True, False)
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (128, 1e6, None)
    assert config.eos_token_ids == (151645,)
    # As its README switches YaRN on, with the kind under its old name and a whole factor.
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    config = hf_config.from_hf(QWEN3_8B | {"rope_scaling": yarn}, "config.json")
    assert config.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_position_embeddings=32768
    )


def test_defaults_of_older_llama_files():
    old = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
    }
    config = hf_config.from_hf(old, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (32, 128, 10000.0)
    typed = {k: v for k, v in old.items() if k != "architectures"} | {"model_type": "llama"}
    assert hf_config.from_hf(typed, "config.json") == config
    linear = old | {"rope_scaling": {"type": "linear", "factor": 4}}
    assert hf_config.from_hf(linear, "x").rope_scaling == RopeScaling(kind="linear", factor=4.0)
    dynamic = old | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    scaling = hf_config.from_hf(dynamic, "x").rope_scaling
    assert scaling.original_max_position_embeddings == 2048


YARN = {"rope_type": "yarn", "factor": 4.0}
BAD_CONFIGS = {
    "architecture": ({"architectures": ["GemmaForCausalLM"]}, r"\['GemmaForCausalLM'\] are not"),
    "two": ({"architectures": ["LlamaForCausalLM", "X"]}, "are not implemented; known are Llama"),
    "type": ({"architectures": None, "model_type": "phi"}, "model_type 'phi'"),
    "both": ({"model_type": "qwen2"}, "does not go with model_type 'qwen2'"),
    "window": ({"use_sliding_window": True}, "use_sliding_window=True, but only False"),
    "layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"\['sliding_attention'\]",
    ),
    "bias": ({"attention_bias": True}, "attention_bias=True, but only False"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias=True"),
    "act": ({"hidden_act": "gelu"}, "hidden_act='gelu', but only 'silu'"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    "lacks": (
        {"vocab_size": None, "num_hidden_layers": None},
        "lacks 'vocab_size'; lacks 'num_hid",
    ),
    "kv": ({"num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
    "head_dim": ({"head_dim": None}, "lacks 'head_dim'"),
    "groups": ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
    "eos": ({"eos_token_id": 151936}, "outside the vocabulary of 151936"),
    "kind": (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope kind 'longrope' is not implemented",
    ),
    "unknown": (
        {"rope_scaling": YARN | {"attn_factor": 0.9}},
        r"'yarn' has unknown settings \['attn_factor'\]",
    ),
    "needed": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks .*low_freq_factor"),
    "factor": ({"rope_scaling": {"rope_type": "linear"}}, r"lacks \['factor'\]"),
    "small": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
    "mrope": ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
    "nested": ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
    "twice": (
        {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
        "factor is 4.0 in one place and 2.0 in another",
    ),
    "theta": (
        {"rope_parameters": {"rope_theta": 1e4}},
        "rope_theta is 1000000 at the top but 10000",
    ),
    "rotary": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "dynamic": (
        {
            "rope_scaling": {
                "type": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
            }
        },
        "max_position_embeddings=40960, but original_max_position_embeddings is 4096",
    ),
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_configuration_refused(fault):
    changes, message = BAD_CONFIGS[fault]
    with pytest.raises(ValueError, match=message) as caught:
        hf_config.from_hf(QWEN3_8B | changes, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


def test_configuration_with_odd_heads_refused():
    raw = {k: v for k, v in QWEN3_8B.items() if k not in ("head_dim", "model_type")}
    raw |= {"architectures": ["LlamaForCausalLM"], "hidden_size": 4097}
    with pytest.raises(
        ValueError, match="hidden_size=4097 is not a multiple of .*=32; set head_dim"
    ):
        hf_config.from_hf(raw, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "qkv_bias=True and qk_norm=False; no architecture fits"),
        (
            {
                "rope_scaling": RopeScaling(
                    kind="dynamic", factor=2.0, original_max_position_embeddings=32
                )
            },
            "=32 cannot be written: it must be max_position_embeddings=64",
        ),
    ],
)
def test_configuration_cannot_be_written(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_config.to_hf(dataclasses.replace(config_of(), **changes))
