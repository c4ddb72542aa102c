"""Between a Hugging Face `config.json` and `ModelConfig`; what is not implemented is refused."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import ModelConfig, RopeScaling

# Architecture -> family; the key is what `architectures` of a config.json says.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# `config.json` name -> `ModelConfig` field, for those that are copied as they are.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}

# What a setting must be (or be absent) for our forward pass to compute the same thing.
REQUIRED = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
}

# Rope kind -> the settings it reads, besides the base and the kind itself.
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ORIGINAL = "original_max_position_embeddings"
ROPE_SETTINGS = {
    "default": (),
    "linear": ("factor", _ORIGINAL),
    "dynamic": ("factor", _ORIGINAL),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, *_YARN),
}
_ROPE_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ROPE_SETTINGS["llama3"],
    "yarn": ("factor",),
}


def from_hf(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Reads the description of a policy out of a `config.json`.

    Args:
      config: the parsed file.
      source: what the file is called in messages.

    Raises:
      ValueError: naming the architecture, the setting or the rope kind that is missing, unknown or
        not implemented.
    """
    family = _family(config, source)
    problems = [f"lacks {name!r}" for name in SIZES if config.get(name) is None]
    problems += [
        f"has {name}={config[name]!r}, but only {allowed[0]!r} is implemented"
        for name, allowed in REQUIRED.items()
        if name in config and config[name] not in allowed
    ]
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        problems.append(f"has layer_types {kinds}, but only 'full_attention' is implemented")
    if family != "llama" and config.get("num_key_value_heads") is None:
        problems.append("lacks 'num_key_value_heads'")
    if family == "qwen3" and config.get("head_dim") is None:
        problems.append("lacks 'head_dim'")
    if problems:
        raise ValueError(f"{source}: " + "; ".join(problems))

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"{source}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
            "set head_dim"
        )
    length = config.get("max_position_embeddings") or (2048 if family == "llama" else 32768)
    eps = config.get("rms_norm_eps")
    try:
        theta, scaling = _rope(config, length)
        return ModelConfig(
            family=family,
            **{field: config[name] for name, field in SIZES.items()},
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=hidden // heads if head_dim is None else head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=1e-6 if eps is None else float(eps),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_position_embeddings=length,
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the ids of an `eos_token_id`, which is an id, a list of ids or nothing."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _family(config: Mapping[str, Any], source: str) -> str:
    known = ", ".join(ARCHITECTURES)
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not names:
        if model_type not in ARCHITECTURES.values():
            raise ValueError(
                f"{source}: no architectures and model_type {model_type!r}; known are {known}"
            )
        return model_type
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(f"{source}: architectures {names} are not implemented; known are {known}")
    family = ARCHITECTURES[names[0]]
    if model_type not in (None, family):
        raise ValueError(f"{source}: {names[0]} does not go with model_type {model_type!r}")
    return family


def _rope(config: Mapping[str, Any], length: int) -> tuple[float, RopeScaling | None]:
    """Returns the rotary base and its stretch, from either of the two places they are written."""
    merged: dict[str, Any] = {}
    for place in ("rope_scaling", "rope_parameters"):
        for name, value in (config.get(place) or {}).items():
            name = "rope_type" if name == "type" else name
            if name in merged and merged[name] != value:
                raise ValueError(
                    f"{name} is {merged[name]!r} in one place and {value!r} in another "
                    "of rope_scaling and rope_parameters"
                )
            merged[name] = value
    theta = config.get("rope_theta")
    if theta is not None and merged.get("rope_theta", theta) != theta:
        raise ValueError(
            f"rope_theta is {theta} at the top but {merged['rope_theta']} in rope_parameters"
        )
    theta = float(merged.pop("rope_theta", None) or theta or 10000.0)
    if merged.pop("partial_rotary_factor", 1) not in (1, None):
        raise ValueError("partial_rotary_factor other than 1 is not implemented")
    kind = merged.pop("rope_type", "default")
    if kind not in ROPE_SETTINGS:
        raise ValueError(f"rope kind {kind!r} is not implemented; known are {tuple(ROPE_SETTINGS)}")
    settings = {name: value for name, value in merged.items() if value is not None}
    unknown = sorted(set(settings) - set(ROPE_SETTINGS[kind]))
    missing = [name for name in _ROPE_NEEDED[kind] if name not in settings]
    if unknown or missing:
        raise ValueError(f"rope kind {kind!r} has unknown settings {unknown} and lacks {missing}")
    if kind == "default":
        return theta, None
    if kind in ("dynamic", "yarn"):
        settings.setdefault(_ORIGINAL, length)
    if kind == "dynamic" and settings[_ORIGINAL] != length:
        raise ValueError(
            f"rope kind 'dynamic' stretches beyond max_position_embeddings={length}, "
            f"but {_ORIGINAL} is {settings[_ORIGINAL]}"
        )
    # JSON writes 8.0 as 8 now and then; only these two are not real numbers.
    exact = (_ORIGINAL, "truncate")
    settings = {n: v if n in exact else float(v) for n, v in settings.items()}
    return theta, RopeScaling(kind=kind, **settings)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes a `config.json` that transformers 4 and 5 load.

    The rotary base and stretch are written both ways: `rope_theta` with `rope_scaling` (4) and
    `rope_parameters` (5).

    Raises:
      ValueError: if no supported architecture computes what the description says.
    """
    biased, normed = config.family == "qwen2", config.family == "qwen3"
    if (config.qkv_bias, config.qk_norm) != (biased, normed):
        raise ValueError(
            f"family {config.family!r} has qkv_bias={biased} and qk_norm={normed}, but the policy "
            f"has qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}; no architecture fits"
        )
    scaling = _scaling_to_hf(config)
    names = {family: name for name, family in ARCHITECTURES.items()}
    out: dict[str, Any] = {
        "architectures": [names[config.family]],
        "model_type": config.family,
        **{name: getattr(config, field) for name, field in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "attention_dropout": 0.0,
        **token_fields(config),
    }
    if config.family != "qwen2":
        out["attention_bias"] = False
    if config.family == "llama":
        out["mlp_bias"] = False
    else:
        out["use_sliding_window"] = False
    return out


def token_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the ids of special tokens as `config.json` and `generation_config.json` hold them."""
    eos = list(config.eos_token_ids)
    return {
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _scaling_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    settings = {name: getattr(scaling, name) for name in ROPE_SETTINGS[scaling.kind]}
    if scaling.kind == "dynamic":
        # transformers takes the length from max_position_embeddings and warns of a second one.
        original = settings.pop(_ORIGINAL)
        if original != config.max_position_embeddings:
            raise ValueError(
                f"rope kind 'dynamic' with {_ORIGINAL}={original} cannot be written: it must be "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
    settings = {name: value for name, value in settings.items() if value is not None}
    return {"rope_type": scaling.kind, **settings}
