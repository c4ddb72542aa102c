"""Small policies of every family, for the tests of this folder."""

import numpy as np

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
