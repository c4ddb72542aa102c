"""EAGLE-3 drafts as the files that other systems serve and train.

Written is the layout that SGLang, vLLM and SpecForge share (keys `midlayer.*`). Read are that one,
the same with ModelOpt's keys (`layers.0.*`), and speculators' (`layers.0.*`, an own config.json).
Engines load drafts leniently and then merely draft badly, so both directions here are strict.
"""

import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float, Int

from jaxspec.drafts.base import DraftWeights
from jaxspec.drafts.eagle3 import Eagle3, Eagle3Config
from jaxspec.io import hf_config
from jaxspec.io.safetensors import DTYPES, INDEX, SINGLE
from jaxspec.models.config import ModelConfig
from jaxspec.params import check_params

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
SPECULATORS = "eagle3"

# Our parameter -> tensor in the file. `midlayer.` is `layers.0.` in the other layouts.
NAMES = {
    "fc": "fc.weight",
    "taps_norm": "input_norm.weight",
    "input_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "q": "midlayer.self_attn.q_proj.weight",
    "k": "midlayer.self_attn.k_proj.weight",
    "v": "midlayer.self_attn.v_proj.weight",
    "o": "midlayer.self_attn.o_proj.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "gate": "midlayer.mlp.gate_proj.weight",
    "up": "midlayer.mlp.up_proj.weight",
    "down": "midlayer.mlp.down_proj.weight",
    "norm": "norm.weight",
    "lm_head": "lm_head.weight",
}
EMBEDDING, OFFSETS, MEMBERS = "embed_tokens.weight", "d2t", "t2d"
AUX_IDS = "eagle_aux_hidden_state_layer_ids"

# What a flag must be (or be absent) for our draft to compute the same thing. They stand at the
# top or in `eagle_config`.
REQUIRED_FLAGS: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "fc_norm": (False, None),
    "bias": (False, None),
    "parallel_drafting": (False, None),
    "embed_requires_grad": (False, None),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False, None),
    "parallel_draft_step": (1, None),
}
_FLOATS = {code for code, _ in DTYPES.values()}


def eagle3_config(raw: Mapping[str, Any], target: ModelConfig, source: str) -> Eagle3Config:
    """Reads a draft's description out of its `config.json`.

    Layer ids are brought to ours, "output of layer i": speculators counts layer inputs, which is
    one more. `max_position_embeddings` becomes the target's, which is as far as the draft is asked
    to go. Settings of training (passes, objective) are not in the file and are the defaults.

    Args:
      raw: the parsed file.
      target: the policy that the draft is for.
      source: what the file is called in messages.

    Raises:
      ValueError: naming the setting that is missing, contradictory or not implemented, or both
        numbers where the draft does not fit the policy.
    """
    speculators = _is_speculators(raw, source)
    layer = raw.get("transformer_layer_config") or {} if speculators else raw
    merged = {**layer, **{k: v for k, v in raw.items() if v is not None}}
    for name, allowed in REQUIRED_FLAGS.items():
        value = _flag(merged, name, allowed[0], source)
        if value not in allowed:
            raise ValueError(
                f"{source} has {name}={value!r}, but only {allowed[0]!r} is implemented"
            )
    # SpecForge means by it "norm before the head" (true when absent), speculators, Automodel and
    # vLLM "feed the normed state back" (false when absent). Only absence says one thing to all.
    norm_output = _flag(merged, "norm_output", None, source)
    if norm_output not in ((None, False) if speculators else (None,)):
        raise ValueError(
            f"{source} has norm_output={norm_output!r}, which systems read in opposite ways; "
            "remove it if the draft feeds its state back before the norm and its head reads it "
            "after"
        )
    if layer.get("num_hidden_layers") != 1:
        raise ValueError(
            f"{source} has num_hidden_layers={layer.get('num_hidden_layers')}, but 1 is implemented"
        )
    fields = {**layer, "architectures": None, "model_type": layer.get("model_type", "llama")}
    if fields["model_type"] != "llama":
        raise ValueError(f"{source} has model_type {fields['model_type']!r}, expected 'llama'")
    shape = hf_config.from_hf(fields, source)
    _check_equal(source, "hidden_size", shape.hidden_size, target.hidden_size)
    _check_equal(source, "vocab_size", shape.vocab_size, target.vocab_size)
    if merged.get("target_hidden_size") is not None:
        _check_equal(source, "target_hidden_size", merged["target_hidden_size"], target.hidden_size)
    taps = _tap_layers(merged, target, speculators, source)
    return Eagle3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rope_scaling=shape.rope_scaling,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        tap_layers=taps,
        vocab_size=shape.vocab_size,
        draft_vocab_size=merged.get("draft_vocab_size") or shape.vocab_size,
        # vLLM's reader of speculators files takes an absent flag as true.
        norm_before_residual=_flag(merged, "norm_before_residual", speculators, source),
        norm_before_fc=bool(_flag(merged, "norm_before_fc", False, source)),
    )


def _is_speculators(raw: Mapping[str, Any], source: str) -> bool:
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind != SPECULATORS:
            raise ValueError(f"{source} is a {kind!r} draft of speculators, not {SPECULATORS!r}")
        return True
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(f"{source} has architectures {names}; known are {ARCHITECTURES}")
    return False


def _flag(raw: Mapping[str, Any], name: str, default: Any, source: str) -> Any:
    """Returns a setting that stands in `eagle_config` or at the top."""
    places = [place[name] for place in (raw.get("eagle_config") or {}, raw) if name in place]
    if len(places) == 2 and places[0] != places[1]:
        raise ValueError(
            f"{source} has {name}={places[0]!r} in eagle_config but {places[1]!r} at the top"
        )
    return places[0] if places else default


def _check_equal(source: str, name: str, draft: int, target: int) -> None:
    if draft != target:
        raise ValueError(
            f"{source} has {name}={draft}, but the policy's is {target}; the draft is for another "
            "policy"
        )


def _tap_layers(
    raw: Mapping[str, Any], target: ModelConfig, speculators: bool, source: str
) -> tuple[int, ...]:
    n = target.num_layers
    shift = 1 if speculators else 0
    default = [1 + shift, n // 2 - 1 + shift, n - 4 + shift]
    ids = _flag(raw, AUX_IDS, None, source) or default
    count = raw.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise ValueError(f"{source} has num_aux_hidden_states={count} but {AUX_IDS}={ids}")
    taps = tuple(i - shift for i in ids)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= n:
        raise ValueError(
            f"{source} has {AUX_IDS}={list(ids)}; ids must ascend from {shift} to {n - 1 + shift} "
            f"for a policy of {n} layers"
        )
    return taps


def read_eagle3(
    folder: str | os.PathLike[str],
    target: ModelConfig,
    *,
    embedding: Float[np.ndarray, "vocab dim"] | None = None,
) -> tuple[Eagle3Config, DraftWeights]:
    """Reads a draft, and accepts exactly the tensors that it must have.

    Args:
      folder: holds `config.json` and `model.safetensors` (or its shards and their index).
      target: the policy that the draft is for.
      embedding: the policy's embedding. Needed if the file holds one of its own, as speculators'
        do: our draft reads the policy's, so both must be the same.

    Returns:
      The description, and float32 host arrays with kernels as [in, out].

    Raises:
      ValueError: naming the key or setting that is missing, unexpected, of another shape or dtype,
        or twice there; and both numbers where the draft does not fit the policy.
    """
    folder = pathlib.Path(folder)
    raw = _read_json(folder / "config.json")
    config = eagle3_config(raw, target, str(folder / "config.json"))
    tensors, keys = _read_tensors(folder)
    modelopt = "speculators_model_type" not in raw and any("layers.0." in k for k in keys.values())
    _check_keys(tensors, keys, config, modelopt, str(folder))

    params = {}
    for name, info in Eagle3(config).param_table().items():
        value = tensors[NAMES[name]].astype(np.float32)
        params[name] = np.ascontiguousarray(value.T if _is_kernel(name, info.shape) else value)
    buffers = {}
    if OFFSETS in tensors:
        ids = _target_ids(tensors[OFFSETS], tensors.get(MEMBERS), config, str(folder))
        order = np.argsort(ids)  # our rows are in the order of their ids
        params["lm_head"] = params["lm_head"][order]
        if config.draft_vocab_size < config.vocab_size:
            buffers["vocab_ids"] = ids[order].astype(np.int32)
    if EMBEDDING in tensors:
        _check_embedding(tensors[EMBEDDING], embedding, str(folder))
    return config, DraftWeights(params=params, buffers=buffers)


def _is_kernel(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "lm_head"


def _file_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that a file must hold whatever its vocabulary, [out, in]."""
    return {
        NAMES[name]: info.shape[::-1] if _is_kernel(name, info.shape) else info.shape
        for name, info in Eagle3(config).param_table().items()
    }


def _check_keys(
    tensors: Mapping[str, np.ndarray],
    keys: Mapping[str, str],
    config: Eagle3Config,
    modelopt: bool,
    source: str,
) -> None:
    required = _file_shapes(config)
    optional: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    maps = {OFFSETS: (config.draft_vocab_size,), MEMBERS: (config.vocab_size,)}
    reduced = config.draft_vocab_size < config.vocab_size
    for name, shape in maps.items():  # ModelOpt writes no t2d
        (required if reduced and not (modelopt and name == MEMBERS) else optional)[name] = shape
    known = required | optional
    problems = [f"missing tensor {name}" for name in required if name not in tensors]
    problems += [f"unexpected tensor {keys[name]}" for name in tensors if name not in known]
    for name, value in tensors.items():
        if name not in known:
            continue
        if value.shape != known[name]:
            problems.append(f"tensor {keys[name]} is {value.shape}, config.json says {known[name]}")
        wanted = {OFFSETS: "int64", MEMBERS: "bool"}.get(name)
        if wanted and value.dtype != wanted:
            problems.append(f"tensor {keys[name]} is {value.dtype}, expected {wanted}")
        if not wanted and value.dtype in (np.int64, np.bool_):
            problems.append(f"tensor {keys[name]} is {value.dtype}, expected one of {list(DTYPES)}")
    if problems:
        raise ValueError(f"{source}: " + "; ".join(problems))


def _target_ids(
    offsets: Int[np.ndarray, " draft_vocab"],
    members: Any,
    config: Eagle3Config,
    source: str,
) -> Int[np.ndarray, " draft_vocab"]:
    """Returns the target's id of each row of the draft's head: row + offset."""
    vocab, rows = config.vocab_size, len(offsets)
    ids = np.arange(rows) + offsets
    remedy = "d2t holds offsets (target id = row + d2t[row]), not the ids themselves"
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != rows:
        raise ValueError(
            f"{source}: d2t gives {len(np.unique(ids))} ids from {ids.min()} to {ids.max()} for "
            f"{rows} rows and a vocabulary of {vocab}; {remedy}"
        )
    if members is not None:
        listed = np.flatnonzero(members)
        if not np.array_equal(np.sort(ids), listed):
            raise ValueError(
                f"{source}: t2d marks {len(listed)} ids of which d2t gives "
                f"{np.isin(listed, ids).sum()}, with {rows} rows; {remedy}"
            )
    elif 1 < rows < vocab and (np.diff(offsets) > 0).all():
        # Offsets grow at every row only if no two neighbouring ids were chosen.
        raise ValueError(f"{source}: d2t grows at each of {rows} rows; {remedy}")
    return ids


def _check_embedding(stored: np.ndarray, embedding: np.ndarray | None, source: str) -> None:
    if embedding is None:
        raise ValueError(
            f"{source} holds {EMBEDDING}, but the draft will read the policy's embedding; give "
            "`embedding` to have them compared"
        )
    stored, embedding = stored.astype(np.float32), np.asarray(embedding, np.float32)
    if stored.shape != embedding.shape:
        raise ValueError(f"{source}: {EMBEDDING} is {stored.shape}, not {embedding.shape}")
    apart = np.linalg.norm(stored - embedding) / max(np.linalg.norm(embedding), 1e-30)
    if not apart < 1e-2:  # bfloat16 rounds by 2e-3
        raise ValueError(
            f"{source}: {EMBEDDING} is {apart:.2g} (relative) away from the policy's embedding, "
            "at most 0.01 is rounding; the draft was trained on another one"
        )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _canonical(key: str) -> str:
    key = key.removeprefix("model.")
    return "midlayer." + key.removeprefix("layers.0.") if key.startswith("layers.0.") else key


def _read_tensors(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the tensors under the names of `NAMES`, and the key that each has in its file."""
    index = folder / INDEX
    if index.exists() == (folder / SINGLE).exists():
        raise ValueError(f"{folder} must hold one of {SINGLE} and {INDEX}")
    listed = _read_json(index).get("weight_map", {}) if index.exists() else None
    files = [SINGLE] if listed is None else sorted(set(listed.values()))
    tensors: dict[str, np.ndarray] = {}
    keys: dict[str, str] = {}
    origin: dict[str, str] = {}
    for name in files:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{index} lists {name}, which does not exist")
        try:
            with safetensors.safe_open(file, framework="np") as reader:
                for key in reader.keys():  # noqa: SIM118
                    canonical = _canonical(key)
                    if canonical in tensors:
                        raise ValueError(
                            f"{folder} holds {canonical} twice: {keys[canonical]} in "
                            f"{origin[canonical]} and {key} in {name}"
                        )
                    code = reader.get_slice(key).get_dtype()
                    if code not in _FLOATS | {"I64", "BOOL"}:
                        raise ValueError(f"{file}: tensor {key} has dtype {code}")
                    tensors[canonical] = reader.get_tensor(key)
                    keys[canonical], origin[canonical] = key, name
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is broken: {error}") from error
    if listed is not None and listed != {key: origin[name] for name, key in keys.items()}:
        wrong = sorted(set(listed) ^ set(keys.values()))
        raise ValueError(f"{index} does not list what its files hold; they differ in {wrong}")
    return tensors, keys


def write_eagle3(
    folder: str | os.PathLike[str],
    config: Eagle3Config,
    weights: DraftWeights,
    target: ModelConfig,
    *,
    dtype: str = "bfloat16",
    include_embedding: Float[Any, "vocab dim"] | None = None,
) -> pathlib.Path:
    """Writes a draft as a folder that SGLang, vLLM, sglang-jax and tpu-inference load.

    It is written beside `folder`, read back and compared, and renamed at the end.

    Args:
      folder: must not exist yet, or be empty.
      config: the draft's shape.
      weights: host or device arrays.
      target: the policy that the draft is for; its max_position_embeddings and the ids of its
        special tokens go into the file.
      dtype: "float32", "bfloat16" or "float16".
      include_embedding: the policy's embedding, for an engine that does not take it from there.

    Returns:
      The folder.

    Raises:
      ValueError: if the folder is in use, or draft, weights and policy do not fit one another.
    """
    folder = pathlib.Path(folder)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {tuple(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; export to another folder")
    raw = eagle3_to_hf(config, target, dtype)
    tensors = _file_tensors(config, weights, dtype)
    if include_embedding is not None:
        include_embedding = np.asarray(jax.device_get(include_embedding), np.float32)
        tensors[EMBEDDING] = include_embedding.astype(DTYPES[dtype][1])

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
        for file in partial.iterdir():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        _, back = read_eagle3(partial, target, embedding=include_embedding)
        _check_same(_file_tensors(config, back, dtype), tensors, folder)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def eagle3_to_hf(config: Eagle3Config, target: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a draft, with every flag whose absence means two things.

    Raises:
      ValueError: if the draft does not fit the policy, or taps its last layer (converters number
        it out of existence).
    """
    source, n = "the draft to write", target.num_layers
    _check_equal(source, "hidden_size", config.hidden_size, target.hidden_size)
    _check_equal(source, "vocab_size", config.vocab_size, target.vocab_size)
    if config.tap_layers[-1] >= n - 1:
        raise ValueError(
            f"tap_layers={config.tap_layers} cannot be exported for a policy of {n} layers: the "
            f"last id may be {n - 2}, since other systems drop the output of layer {n - 1}"
        )
    layer = ModelConfig(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
        pad_token_id=target.pad_token_id,
    )
    tokens = {k: v for k, v in hf_config.token_fields(target).items() if v is not None}
    fields = {k: v for k, v in hf_config.to_hf(layer).items() if not k.endswith("_token_id")}
    return {
        **fields,
        **tokens,
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": False,
        "num_aux_hidden_states": len(config.tap_layers),
        "eagle_config": {
            AUX_IDS: list(config.tap_layers),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _file_tensors(config: Eagle3Config, weights: DraftWeights, dtype: str) -> dict[str, np.ndarray]:
    """Returns what a file holds: [out, in] in `dtype`, and the vocabulary's maps if reduced."""
    draft = Eagle3(config)
    check_params(draft.param_table(), weights.params, "draft to write")
    check_params(draft.buffer_table(), weights.buffers, "draft's buffers to write")
    tensors = {}
    for name, info in draft.param_table().items():
        value = np.asarray(jax.device_get(weights.params[name]))
        value = value.T if _is_kernel(name, info.shape) else value
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(value, DTYPES[dtype][1])
        if not np.isfinite(value.astype(np.float32, copy=False)).all():
            raise ValueError(f"parameter {name} of the draft is not finite as {dtype}")
        tensors[NAMES[name]] = value
    if draft.reduced:
        ids = np.asarray(jax.device_get(weights.buffers["vocab_ids"])).astype(np.int64)
        if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
            raise ValueError(
                f"vocab_ids run from {ids[0]} to {ids[-1]}; they must be ascending, unique and "
                f"below vocab_size={config.vocab_size}"
            )
        tensors[OFFSETS] = ids - np.arange(len(ids))
        tensors[MEMBERS] = np.zeros(config.vocab_size, bool)
        tensors[MEMBERS][ids] = True
    return tensors


def _check_same(
    back: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], folder: pathlib.Path
) -> None:
    for name, value in back.items():
        if not np.array_equal(value, tensors[name]):
            raise ValueError(f"{folder}: tensor {name} did not read back as it was written")
