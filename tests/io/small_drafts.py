"""A small policy, a draft for it, and its folder, for the tests of this folder."""

import dataclasses
import json

import jax
import numpy as np
import safetensors.numpy

from jaxspec.drafts.base import DraftWeights
from jaxspec.drafts.eagle3 import Eagle3, Eagle3Config
from jaxspec.models.config import ModelConfig

TARGET = ModelConfig(
    family="qwen3",
    vocab_size=19,
    hidden_size=10,
    intermediate_size=22,
    num_layers=8,
    num_heads=5,
    num_kv_heads=5,
    head_dim=2,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    eos_token_ids=(2, 3),
    pad_token_id=0,
)
CONFIG = Eagle3Config(
    hidden_size=10,
    intermediate_size=14,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    tap_layers=(1, 3, 5),
    vocab_size=19,
    draft_vocab_size=7,
    rope_theta=5000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
)
FULL = dataclasses.replace(CONFIG, draft_vocab_size=19)
IDS = np.array([0, 2, 3, 7, 11, 12, 18])
D2T = [0, 1, 1, 4, 7, 7, 12]
SHAPES = {
    "fc.weight": (10, 30),
    "midlayer.self_attn.q_proj.weight": (12, 20),
    "midlayer.self_attn.k_proj.weight": (4, 20),
    "midlayer.self_attn.v_proj.weight": (4, 20),
    "midlayer.self_attn.o_proj.weight": (10, 12),
    "midlayer.mlp.gate_proj.weight": (14, 10),
    "midlayer.mlp.up_proj.weight": (14, 10),
    "midlayer.mlp.down_proj.weight": (10, 14),
    "midlayer.hidden_norm.weight": (10,),
    "midlayer.input_layernorm.weight": (10,),
    "midlayer.post_attention_layernorm.weight": (10,),
    "norm.weight": (10,),
    "lm_head.weight": (7, 10),
    "d2t": (7,),
    "t2d": (19,),
}


def random_weights(config, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(size=info.shape).astype(np.float32)
        for name, info in Eagle3(config).param_table().items()
    }
    reduced = config.draft_vocab_size < config.vocab_size
    return DraftWeights(
        params=params, buffers={"vocab_ids": IDS.astype(np.int32)} if reduced else {}
    )


EMBEDDING = np.random.default_rng(9).normal(size=(19, 10)).astype(np.float32)


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    return config, safetensors.numpy.load_file(folder / "model.safetensors")


def store(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, (a.params, a.buffers), (b.params, b.buffers))
