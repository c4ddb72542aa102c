"""Policies as Hugging Face folders: `config.json` and one or more `.safetensors` files."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors

from jaxspec.io import hf_config
from jaxspec.models.blocks import rope_frequencies
from jaxspec.models.config import ModelConfig
from jaxspec.models.policy import param_table
from jaxspec.params import check_params, map_table

Params = dict[str, Any]

# Our name -> the tensor's name in a Hugging Face folder.
OUTER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
# Old Llama files also hold a buffer that follows from rope_theta.
LAYER_BUFFER = "model.layers.{}.self_attn.rotary_emb.inv_freq"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.values()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor of a file lives in the parameter tree.

    Attributes:
      path: keys from the root of the tree.
      layer: index into the stacked array; None for a parameter outside the layers.
      transpose: the file holds [out, in], the tree [in, out].
      shape: shape in the file.
    """

    path: tuple[str, ...]
    layer: int | None
    transpose: bool
    shape: tuple[int, ...]

    def view(self, params: Params) -> Any:
        """Returns the tensor's part of the tree, oriented as in the file."""
        leaf = params
        for key in self.path:
            leaf = leaf[key]
        part = leaf if self.layer is None else leaf[self.layer]
        return part.T if self.transpose else part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor as the header of a `.safetensors` file describes it."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]


def tensor_slots(
    config: ModelConfig, outer: Mapping[str, str], layer: Mapping[str, str]
) -> dict[str, Slot]:
    """Returns every tensor that a file of this policy must hold, under the file's names.

    Args:
      config: the policy's shape.
      outer: file's name of each parameter outside the layers.
      layer: file's name of each parameter of a layer, with `{}` for the layer's index.
    """
    table = param_table(config)
    slots = {}
    for name, info in table.items():
        if name != "layers":
            slots[outer[name]] = Slot(path=(name,), layer=None, transpose=False, shape=info.shape)
    for index in range(config.num_layers):
        for name, info in table["layers"].items():
            shape = info.shape[1:]
            kernel = len(shape) == 2
            slots[layer[name].format(index)] = Slot(
                path=("layers", name),
                layer=index,
                transpose=kernel,
                shape=shape[::-1] if kernel else shape,
            )
    return slots


def check_tensors(
    found: Mapping[str, tuple[int, ...]], slots: Mapping[str, Slot], source: str
) -> None:
    """Checks that a file holds exactly the tensors that the policy has.

    Args:
      found: shape of every tensor in the file.
      slots: what the policy has.
      source: what the file is called in messages.

    Raises:
      ValueError: naming every missing, unexpected and wrongly shaped tensor.
    """
    problems = [f"missing tensor {name}" for name in slots if name not in found]
    problems += [f"unexpected tensor {name}" for name in found if name not in slots]
    problems += [
        f"tensor {name} has shape {tuple(found[name])}, the configuration says {slot.shape}"
        for name, slot in slots.items()
        if name in found and tuple(found[name]) != slot.shape
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"{source}: " + "; ".join(problems[:8]) + more)


def empty_params(config: ModelConfig) -> Params:
    """Returns unfilled float32 host arrays for every parameter."""
    return map_table(lambda info: np.empty(info.shape, np.float32), param_table(config))


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Reads a folder's `config.json`, and the ids that end a reply from `generation_config.json`.

    Chat models list every id that ends a reply only in the latter.

    Raises:
      ValueError: if a file is missing or not JSON, or says what is not implemented.
    """
    path = pathlib.Path(folder) / "config.json"
    raw = _read_json(path)
    generation = path.with_name("generation_config.json")
    if generation.exists():
        ids = {k: v for k, v in _read_json(generation).items() if v is not None}
        raw |= {k: ids[k] for k in ("eos_token_id", "bos_token_id", "pad_token_id") if k in ids}
    return hf_config.from_hf(raw, str(path))


def read_policy(folder: str | os.PathLike[str]) -> tuple[ModelConfig, Params]:
    """Reads a policy from a Hugging Face folder.

    Args:
      folder: holds `config.json` and `model.safetensors` (or its shards and their index).

    Returns:
      The description, and float32 host arrays stacked over layers with kernels as [in, out].

    Raises:
      ValueError: naming file and tensor for whatever is missing, unexpected, of another shape or
        dtype, twice there or cut short.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    stored = _stored_tensors(folder)
    slots = tensor_slots(config, OUTER_NAMES, LAYER_NAMES)
    redundant = {LAYER_BUFFER.format(i) for i in range(config.num_layers)}
    if config.tie_word_embeddings:
        redundant.add(OUTER_NAMES["lm_head"])
    found = {name: tensor.shape for name, tensor in stored.items() if name not in redundant}
    check_tensors(found, slots, str(folder))

    params = empty_params(config)
    by_file = collections.defaultdict(list)
    for name, tensor in stored.items():
        by_file[tensor.file].append(name)
    copies = {}
    for file, names in by_file.items():
        try:
            with safetensors.safe_open(file, framework="np") as reader:
                for name in names:
                    if name in slots:
                        slots[name].view(params)[...] = reader.get_tensor(name)
                    else:
                        copies[name] = reader.get_tensor(name).astype(np.float32)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is broken: {error}") from error
    for name, value in copies.items():
        _check_copy(name, value, config, params, stored[name].file)
    return config, params


def _check_copy(
    name: str, value: np.ndarray, config: ModelConfig, params: Params, file: pathlib.Path
) -> None:
    """Checks a tensor that says again what the policy says elsewhere."""
    if name == OUTER_NAMES["lm_head"]:
        if not np.array_equal(value, params["embed"]):
            raise ValueError(
                f"{file}: tie_word_embeddings is true but {name} {value.shape} differs from "
                f"{OUTER_NAMES['embed']} {params['embed'].shape}; set tie_word_embeddings to false"
            )
        return
    # Half precision keeps three digits; it always holds the frequencies before any stretch.
    freqs, _ = rope_frequencies(config.head_dim, config.rope_theta, None)
    if value.shape != freqs.shape or not np.allclose(value, freqs, rtol=1e-2, atol=1e-6):
        raise ValueError(f"{file}: {name} is not that of rope_theta={config.rope_theta:g}")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _stored_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """Returns every tensor of a folder, with its shards checked against their index."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one not meant")
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    listed = _read_json(index).get("weight_map", {})
    stored: dict[str, Stored] = {}
    for name in sorted(set(listed.values())):
        if not (folder / name).exists():
            raise ValueError(f"{index} lists {name}, which does not exist")
        for key, tensor in read_header(folder / name).items():
            if key in stored:
                raise ValueError(f"tensor {key} is in both {stored[key].file} and {tensor.file}")
            stored[key] = tensor
    for key in sorted(set(listed) | set(stored)):
        held = stored[key].file.name if key in stored else None
        if listed.get(key) != held:
            raise ValueError(f"{index} puts {key} in {listed.get(key)}, but it is in {held}")
    return stored


def read_header(file: pathlib.Path) -> dict[str, Stored]:
    """Reads what a `.safetensors` file holds, and checks that all of it is there.

    Raises:
      ValueError: if the file is cut short, or a tensor's dtype is not one that we read.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(f"{file} is cut short: {size} bytes, its header takes {8 + length}")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise ValueError(f"{file} is cut short: {name} ends at byte {end}, the file at {size}")
        if entry["dtype"] not in _ITEM_BYTES:
            raise ValueError(
                f"{file}: {name} has dtype {entry['dtype']}; readable are {tuple(_ITEM_BYTES)}"
            )
        stored[name] = Stored(file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]))
    return stored


def write_policy(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    dtype: str = "bfloat16",
    tokenizer_files: Mapping[str, bytes | str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> pathlib.Path:
    """Writes a policy as a Hugging Face folder that transformers loads.

    Everything is written beside `folder` and renamed at the end, so that a full disk leaves no
    half of it. One tensor at a time is cast and written; there is no second copy of the policy.

    Args:
      folder: must not exist yet, or be empty.
      config: the policy's shape.
      params: host or device arrays.
      dtype: "float32", "bfloat16" or "float16".
      tokenizer_files: content of further files by name.
      max_shard_bytes: a file that would grow beyond this is split, with an index.

    Returns:
      The folder.

    Raises:
      ValueError: if the folder is in use, the parameters do not fit the description, or a value is
        not finite in `dtype`.
    """
    folder = pathlib.Path(folder)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {tuple(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; export to another folder")
    check_params(param_table(config), params, "parameters to write")
    texts: dict[str, bytes | str] = {
        "config.json": _dump({**hf_config.to_hf(config), "dtype": dtype, "torch_dtype": dtype}),
        "generation_config.json": _dump(hf_config.token_fields(config)),
    }
    for name, content in (tokenizer_files or {}).items():
        if name in texts or name != pathlib.PurePath(name).name or name.endswith(".safetensors"):
            raise ValueError(f"tokenizer file cannot be called {name!r}")
        texts[name] = content

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        _write_weights(partial, config, params, dtype, max_shard_bytes)
        for name, content in texts.items():
            data = content.encode() if isinstance(content, str) else content
            _write(partial / name, iter([data]))
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(path: pathlib.Path, chunks: Iterator[Any]) -> None:
    with open(path, "wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())


def _write_weights(
    folder: pathlib.Path, config: ModelConfig, params: Params, dtype: str, max_shard_bytes: int
) -> None:
    slots = tensor_slots(config, OUTER_NAMES, LAYER_NAMES)
    item = DTYPES[dtype][1].itemsize
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, slot in slots.items():
        size = math.prod(slot.shape) * item
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        total = sum(math.prod(slot.shape) for slot in slots.values()) * item
        weight_map = {n: f for f, names in zip(files, shards, strict=True) for n in names}
        index = _dump({"metadata": {"total_size": total}, "weight_map": weight_map})
        _write(folder / INDEX, iter([index.encode()]))
    for file, names in zip(files, shards, strict=True):
        _write(folder / file, _file_chunks({n: slots[n] for n in names}, params, dtype))


def _file_chunks(slots: Mapping[str, Slot], params: Params, dtype: str) -> Iterator[Any]:
    """Yields one `.safetensors` file: the header's length, the header, then tensor by tensor."""
    code, target = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, slot in slots.items():
        end = offset + math.prod(slot.shape) * target.itemsize
        header[name] = {"dtype": code, "shape": list(slot.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for name, slot in slots.items():
        value = np.asarray(jax.device_get(slot.view(params)))
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(value, dtype=target)
        if not np.isfinite(value.astype(np.float32, copy=False)).all():
            raise ValueError(f"parameter {name} is not finite as {dtype}")
        yield value.reshape(-1).view(np.uint8).data
