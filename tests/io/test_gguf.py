"""GGUF files: every tensor type, the order of rows, rope scaling, and every refusal."""

import dataclasses

import gguf as library
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from jaxspec.io import gguf
from jaxspec.io.policy import load_policy
from jaxspec.models.blocks import rope_frequencies
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.policy import param_table
from jaxspec.params import map_table

SHAPE = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_ids": (2,),
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "rms_norm_eps": 1e-6},
}


def config_of(family="llama", **changes):
    return ModelConfig(family=family, **{**SHAPE, **FAMILIES[family], **changes})


def random_params(config):
    rng = np.random.default_rng(0)
    return map_table(
        lambda info: rng.standard_normal(info.shape).astype(np.float32), param_table(config)
    )


def permute(weight, heads):
    """What convert_hf_to_gguf.py does to q and k of a llama."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)


def tensors_of(config, params):
    """Our parameters under GGUF names and in GGUF order, as a converter would leave them."""
    names = {
        "attn_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    }
    out = {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if "lm_head" in params:
        out["output.weight"] = params["lm_head"]
    for i in range(config.num_layers):
        for ours, name in names.items():
            if ours not in params["layers"]:
                continue
            value = params["layers"][ours][i]
            value = value.T if value.ndim == 2 else value
            if config.family == "llama" and ours in ("q", "k"):
                value = permute(value, config.num_heads if ours == "q" else config.num_kv_heads)
            out[f"blk.{i}.{name}"] = value
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def settings_of(config):
    arch = config.family
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


def write(path, arch, settings, tensors, endian=library.GGUFEndian.LITTLE):
    """Writes a GGUF file; a tensor is an array, or (bytes, type) when quantised."""
    writer = library.GGUFWriter(path, arch, endianess=endian)
    for name, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_string(name, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    config = config_of()
    return config, random_params(config)


def make(path, config, params, settings=(), tensors=()):
    settings = {**settings_of(config), **dict(settings)}
    tensors = {**tensors_of(config, params), **dict(tensors)}
    return write(
        path,
        config.family,
        {k: v for k, v in settings.items() if v is not None},
        {k: v for k, v in tensors.items() if v is not None},
    )


def same(ours, theirs):
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_a_converter_wrote(family, tmp_path):
    config = config_of(family)
    params = random_params(config)
    loaded = load_policy(str(make(tmp_path / "m.gguf", config, params)))
    assert loaded.config == config
    assert loaded.tokenizer_source == str(tmp_path / "m.gguf")
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    assert same(loaded.params, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_llama_alone_are_put_back(family, tmp_path, monkeypatch):
    """Leaving the rows as they are in the file is seen for llama, and only there."""
    monkeypatch.setattr(gguf, "unpermute", lambda weight, heads: weight)
    config = config_of(family)
    params = random_params(config)
    loaded = gguf.read_policy(make(tmp_path / "m.gguf", config, params))[1]
    assert same(loaded, params) == (family != "llama")


def test_heads_keep_their_index(model, tmp_path):
    """8 query heads over 2 key heads, each filled with its own index, rows numbered within."""
    config, params = model
    params = {**params, "layers": dict(params["layers"])}
    for name, heads in (("q", 8), ("k", 2)):
        rows = np.arange(heads)[:, None] + np.arange(8) / 8
        params["layers"][name] = np.broadcast_to(rows.reshape(-1), (2, 32, heads * 8)).astype("f4")
    path = make(tmp_path / "m.gguf", config, params)
    layers = gguf.read_policy(path)[1]["layers"]
    np.testing.assert_array_equal(layers["q"], params["layers"]["q"])
    np.testing.assert_array_equal(layers["k"], params["layers"]["k"])


def test_every_tensor_type(model, tmp_path):
    config, params = model
    config = dataclasses.replace(config, num_layers=len(gguf.TENSOR_TYPES))
    params = random_params(config)
    rng = np.random.default_rng(1)
    tensors, expected = {}, []
    for i, kind in enumerate(gguf.TENSOR_TYPES):
        value = np.ascontiguousarray(params["layers"]["down"][i].T)
        if kind in (Quant.F32, Quant.F16):
            data = value.astype(np.float16 if kind == Quant.F16 else np.float32)
        elif kind.name.endswith("_K"):
            # No quantiser in Python; any bytes below 0x3c are blocks with scales below 1.
            shape = library.quant_shape_to_byte_shape(value.shape, kind)
            data = rng.integers(0, 0x3C, shape, dtype=np.uint8)
        else:
            data = library.quantize(value, kind)
        tensors[f"blk.{i}.ffn_down.weight"] = (data, kind)
        expected.append(np.asarray(library.dequantize(data, kind), np.float32).T)
        if not kind.name.endswith("_K"):
            assert np.abs(expected[-1] - value.T).max() < 0.5
    path = make(tmp_path / "m.gguf", config, params, tensors=tensors)
    layers = gguf.read_policy(path)[1]["layers"]
    np.testing.assert_array_equal(layers["down"], np.stack(expected))
    np.testing.assert_array_equal(layers["up"], params["layers"]["up"])


def test_ids_that_end_a_reply(model, tmp_path):
    settings = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    config, _ = gguf.read_policy(make(tmp_path / "m.gguf", *model, settings))
    assert config.eos_token_ids == (2, 5)


def test_settings_may_be_left_out(tmp_path):
    config = config_of(num_kv_heads=4, num_heads=4)
    names = ("head_count_kv", "key_length", "value_length")
    settings = {f"llama.attention.{name}": None for name in names}
    settings |= {"llama.rope.freq_base": None, "llama.rope.dimension_count": None}
    settings |= {f"tokenizer.ggml.{n}_token_id": None for n in ("eos", "bos", "padding")}
    path = make(tmp_path / "m.gguf", config, random_params(config), settings)
    expected = config_of(
        num_heads=4, num_kv_heads=4, eos_token_ids=(), bos_token_id=None, pad_token_id=None
    )
    assert gguf.read_policy(path)[0] == expected


SCALING = "llama.rope.scaling."
SCALINGS = {
    "none": ({"type": "none"}, None),
    "linear": ({"type": "linear", "factor": 2.5}, RopeScaling(kind="linear", factor=2.5)),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "finetuned": True},
        RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "betas": (
        {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
        RopeScaling(
            kind="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=8.0,
            beta_slow=2.0,
        ),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(name, model, tmp_path):
    settings, expected = SCALINGS[name]
    settings = {SCALING + key: value for key, value in settings.items()}
    config, _ = gguf.read_policy(make(tmp_path / "m.gguf", *model, settings))
    assert config.rope_scaling == expected


def llama3_factors(head_dim, theta, factor, low=1.0, high=4.0, original=8192):
    """The table as convert_hf_to_gguf.py makes it, in float32."""
    freqs = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype="f4") / head_dim)
    factors = []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_are_recognised(factor, tmp_path):
    config = config_of(rope_theta=500000.0, head_dim=64)
    params = random_params(config)
    factors = llama3_factors(64, 500000.0, factor)
    assert len(set(factors)) > 3
    path = make(tmp_path / "m.gguf", config, params, tensors={"rope_freqs.weight": factors})
    scaling = gguf.read_policy(path)[0].rope_scaling
    assert scaling == RopeScaling(
        kind="llama3", factor=factor, original_max_position_embeddings=8192
    )
    stretched = rope_frequencies(64, 500000.0, scaling)[0]
    plain = rope_frequencies(64, 500000.0, None)[0]
    np.testing.assert_allclose(plain / stretched, factors, rtol=1e-5)


def test_factors_of_one_mean_no_scaling(model, tmp_path):
    tensors = {"rope_freqs.weight": np.ones(4, np.float32)}
    config, _ = gguf.read_policy(make(tmp_path / "m.gguf", *model, tensors=tensors))
    assert config == config_of()


Q = "blk.1.attn_q.weight"
ONES = np.ones(4, np.float32)
REFUSED = {
    "missing": ({}, {Q: None}, f"missing tensor {Q}"),
    "unexpected": ({}, {"blk.0.attn_q.bias": np.ones(64, "f4")}, "unexpected tensor blk.0.attn_q"),
    "extra": ({}, {"blk.2.ffn_up.weight": np.ones((2, 32), "f4")}, "unexpected tensor blk.2"),
    "shape": (
        {},
        {Q: np.ones((32, 64), "f4")},
        rf"tensor {Q} has shape \(32, 64\), the configuration says \(64, 32\)",
    ),
    "type": (
        {},
        {"blk.0.ffn_down.weight": (np.zeros((32, 136), np.uint8), Quant.IQ4_XS)},
        "tensor blk.0.ffn_down.weight has type IQ4_XS; readable are F32, F16",
    ),
    "embedding": ({}, {"token_embd.weight": None}, "token_embd.weight"),
    "lacks": ({"llama.block_count": None}, {}, r"lacks \['block_count'\]"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "lacks"),
    "window": ({"llama.attention.sliding_window": 4096}, {}, "sliding_window=4096 is not impl"),
    "experts": ({"llama.expert_count": 8}, {}, "llama.expert_count=8 is not implemented"),
    "unknown": ({"llama.logit_scale": 0.5}, {}, "llama.logit_scale=0.5 is not implemented"),
    "per layer": ({"llama.attention.head_count": [8, 4]}, {}, "differ by layer"),
    "value": ({"llama.attention.value_length": 16}, {}, "value_length=16 differs from .* 8"),
    "partial": ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count=4 differs from .* 8"),
    "vocabulary": ({"llama.vocab_size": 13}, {}, "has 12 rows, but llama.vocab_size is 13"),
    "tokens": (
        {"tokenizer.ggml.tokens": [f"t{i}" for i in range(13)]},
        {},
        "has 12 rows, .* the tokenizer lists 13 tokens",
    ),
    "eos": ({"tokenizer.ggml.eos_token_id": 12}, {}, r"\[12\] lie outside the vocabulary of 12"),
    "groups": ({"llama.attention.head_count_kv": 3}, {}, "num_heads=8 is not a multiple of .*=3"),
    "scaling": ({SCALING + "type": "longrope"}, {}, "rope.scaling.type 'longrope' is not impl"),
    "factor": ({SCALING + "type": "linear"}, {}, "'linear' lacks rope.scaling.factor"),
    "attn": ({SCALING + "attn_factor": 1.5}, {}, "rope.scaling.attn_factor=1.5 is not implemented"),
    "freqs": ({}, {"rope_freqs.weight": 2 * ONES}, r"rope_freqs.weight \(up to 2\) is not Llama 3"),
    "freqs shape": ({}, {"rope_freqs.weight": np.ones(3, "f4")}, r"shape \(3,\), expected \(4,\)"),
    "freqs twice": (
        {SCALING + "type": "linear", SCALING + "factor": 2.0},
        {"rope_freqs.weight": ONES},
        "rope_freqs.weight beside rope.scaling.type='linear'",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refuses(fault, model, tmp_path):
    settings, tensors, message = REFUSED[fault]
    path = make(tmp_path / "m.gguf", *model, settings, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        gguf.read_policy(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_neutral_settings_are_accepted(model, tmp_path):
    settings = {"llama.expert_count": 0, "llama.attention.causal": True, "llama.vocab_size": 12}
    settings |= {SCALING + "attn_factor": 1.0, "general.name": "toy"}
    assert gguf.read_policy(make(tmp_path / "m.gguf", *model, settings))[0] == config_of()


def test_refuses_another_architecture(model, tmp_path):
    path = write(tmp_path / "m.gguf", "gemma", {}, {"token_embd.weight": np.ones((2, 2), "f4")})
    with pytest.raises(
        ValueError, match="architecture 'gemma' is not implemented; known: .'llama'"
    ):
        gguf.read_policy(path)


@pytest.mark.parametrize("keep", [0, 2, 30, 700, -4])
def test_refuses_a_cut_file(keep, model, tmp_path):
    path = make(tmp_path / "m.gguf", *model)
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=f"{len(data)} bytes. is cut short or not a GGUF"
    ) as caught:
        gguf.read_policy(path)
    assert str(path) in str(caught.value)


def test_refuses_what_is_not_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" * 100)
    with pytest.raises(ValueError, match="not a GGUF file: GGUF magic invalid"):
        gguf.read_policy(path)
    with pytest.raises(ValueError, match="nowhere.gguf is not a file"):
        gguf.read_policy(tmp_path / "nowhere.gguf")


def test_refuses_the_other_byte_order(model, tmp_path):
    config, params = model
    path = write(
        tmp_path / "m.gguf",
        "llama",
        settings_of(config),
        tensors_of(config, params),
        library.GGUFEndian.BIG,
    )
    with pytest.raises(ValueError, match="other byte order"):
        gguf.read_policy(path)
