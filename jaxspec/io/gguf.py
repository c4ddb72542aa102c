"""Policies from GGUF files (llama.cpp), dequantised to float32."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant

from jaxspec.io.safetensors import Params, check_tensors, empty_params, tensor_slots
from jaxspec.models.blocks import rope_frequencies
from jaxspec.models.config import FAMILIES, ModelConfig, RopeScaling

# Our name -> the tensor's name in a GGUF file.
OUTER_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
LAYER_NAMES = {
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
TENSOR_TYPES = (
    *(Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1),
    *(Quant.Q8_0, Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K),
)
# Settings under the architecture's name that are read (or, the last two, change nothing).
_KNOWN = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.finetuned", "tensor_data_layout"),
)
# Settings that are fine as long as they say "nothing".
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "attention.sliding_window": 0,
}
# Llama 3.1 and 3.2 stretch RoPE with these; the file holds only the factors that come of them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_policy(path: str | os.PathLike[str]) -> tuple[ModelConfig, Params]:
    """Reads a policy from a GGUF file.

    Args:
      path: a file of architecture llama, qwen2 or qwen3.

    Returns:
      The description, and float32 host arrays stacked over layers with kernels as [in, out].

    Raises:
      ValueError: naming the file and the setting or tensor that is missing, unexpected, cut short
        or not implemented.
    """
    source = str(path)
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, tensors, source)
    # GGUF lists the fastest dimension first.
    found = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()}
    found.pop(ROPE_FACTORS, None)
    slots = tensor_slots(config, OUTER_NAMES, LAYER_NAMES)
    check_tensors(found, slots, source)
    odd = {n: t.tensor_type.name for n, t in tensors.items() if t.tensor_type not in TENSOR_TYPES}
    if odd:
        name, kind = next(iter(odd.items()))
        known = ", ".join(t.name for t in TENSOR_TYPES)
        raise ValueError(f"{source}: tensor {name} has type {kind}; readable are {known}")

    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    params = empty_params(config)
    for name, slot in slots.items():
        tensor = tensors[name]
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if config.family == "llama" and slot.path[-1] in heads:
            value = unpermute(value, heads[slot.path[-1]])
        slot.view(params)[...] = value.reshape(slot.shape)
    return config, params


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the order in which llama files hold the rows of q and k.

    llama.cpp rotates neighbouring pairs for this architecture, so that rows (i, i + dim/2) of each
    head were interleaved when the file was made (`LlamaModel.permute` in convert_hf_to_gguf.py).

    Args:
      weight: [heads * head_dim, in].
      heads: query heads for q, key/value heads for k.

    Returns:
      [heads * head_dim, in], each head's rows as two halves.
    """
    out, inputs = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, inputs).swapaxes(1, 2).reshape(out, inputs)


class _Reader(gguf.GGUFReader):
    """Reads the header through a plain view of the mapped file.

    A vocabulary is hundreds of thousands of slices, and slicing a `numpy.memmap` costs three times
    as much as slicing an array.
    """

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
    """Opens a GGUF file and reads its header.

    Raises:
      ValueError: if there is no such file, or it is cut short, not GGUF or of the other byte order.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    size = path.stat().st_size
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is cut short or not a GGUF file: {error}"
        ) from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} was written for the other byte order")
    return reader


def _config(reader: gguf.GGUFReader, tensors: Mapping[str, Any], source: str) -> ModelConfig:
    values = {name: field for name, field in reader.fields.items()}

    def get(name: str, default: Any = None) -> Any:
        return values[name].contents() if name in values else default

    arch = get("general.architecture")
    if arch not in FAMILIES:
        raise ValueError(f"{source}: architecture {arch!r} is not implemented; known: {FAMILIES}")
    own = {n[len(arch) + 1 :]: get(n) for n in values if n.startswith(f"{arch}.")}
    for name, value in own.items():
        if name in _NEUTRAL and value == _NEUTRAL[name]:
            continue
        if name not in _KNOWN:
            raise ValueError(f"{source}: setting {arch}.{name}={value!r} is not implemented")
    needed = (
        *("block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.layer_norm_rms_epsilon"),
    )
    missing = [name for name in needed if name not in own]
    missing += [n for n in ("token_embd.weight",) if n not in tensors]
    if missing:
        raise ValueError(f"{source}: lacks {missing}")
    heads = own["attention.head_count"]
    kv_heads = own.get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ValueError(f"{source}: head counts that differ by layer are not implemented")
    head_dim = own.get("attention.key_length", own["embedding_length"] // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise ValueError(
                f"{source}: {arch}.{name}={own[name]} differs from the head's width {head_dim}, "
                "which is not implemented"
            )
    vocab = int(tensors["token_embd.weight"].shape[1])
    named = own.get("vocab_size", vocab)
    listed = len(values["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in values else 0
    if named != vocab or listed > vocab:
        raise ValueError(
            f"{source}: token_embd.weight has {vocab} rows, but {arch}.vocab_size is {named} and "
            f"the tokenizer lists {listed} tokens"
        )
    theta = _short(own.get("rope.freq_base", 10000.0))
    ends = [get(f"tokenizer.ggml.{name}") for name in _END_TOKENS]
    try:
        return ModelConfig(
            family=arch,
            vocab_size=vocab,
            hidden_size=own["embedding_length"],
            intermediate_size=own["feed_forward_length"],
            num_layers=own["block_count"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=_rope_scaling(own, tensors, head_dim, theta, source),
            rms_norm_eps=_short(own["attention.layer_norm_rms_epsilon"]),
            tie_word_embeddings=OUTER_NAMES["lm_head"] not in tensors,
            qkv_bias=arch == "qwen2",
            qk_norm=arch == "qwen3",
            max_position_embeddings=own["context_length"],
            eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
            bos_token_id=get("tokenizer.ggml.bos_token_id"),
            pad_token_id=get("tokenizer.ggml.padding_token_id"),
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _short(value: float) -> float:
    """Returns the shortest decimal that the file's float32 stands for (1e-05, not 9.99..e-06)."""
    return float(str(np.float32(value)))


def _rope_scaling(
    own: Mapping[str, Any],
    tensors: Mapping[str, Any],
    head_dim: int,
    theta: float,
    source: str,
) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "none")
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise ValueError(f"{source}: {ROPE_FACTORS} beside rope.scaling.type={kind!r}")
        factors = np.asarray(tensors[ROPE_FACTORS].data, np.float64)
        return _from_factors(factors, head_dim, theta, source)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{source}: rope.scaling.type {kind!r} is not implemented")
    if "rope.scaling.factor" not in own:
        raise ValueError(f"{source}: rope.scaling.type={kind!r} lacks rope.scaling.factor")
    factor = _short(own["rope.scaling.factor"])
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=own.get(
            "rope.scaling.original_context_length", own["context_length"]
        ),
        beta_fast=_short(own.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_short(own.get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _from_factors(
    factors: np.ndarray, head_dim: int, theta: float, source: str
) -> RopeScaling | None:
    """Recognises the divisors of Llama 3's frequencies; other tables are refused.

    Args:
      factors: [head_dim / 2] what each frequency is divided by.
      head_dim: width of a head.
      theta: rotary base.
      source: the file, for messages.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(
            f"{source}: {ROPE_FACTORS} has shape {factors.shape}, expected {(head_dim // 2,)}"
        )
    if np.all(factors == 1):
        return None
    scaling = RopeScaling(kind="llama3", factor=max(_short(factors.max()), 1.0), **_LLAMA3)
    plain, _ = rope_frequencies(head_dim, theta, None)
    stretched, _ = rope_frequencies(head_dim, theta, scaling)
    if not np.allclose(plain / stretched, factors, rtol=1e-4, atol=0):
        raise ValueError(
            f"{source}: {ROPE_FACTORS} (up to {factors.max():g}) is not Llama 3's table for "
            f"{_LLAMA3}; other tables are not implemented"
        )
    return scaling
