"""The same rollout and the same update in transformers, to be measured against."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.io.safetensors import write_policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import Sample


def available() -> bool:
    """Returns whether transformers and torch can be imported."""
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def load_peer(model: ModelConfig, params: Any, dtype: str) -> Any:
    """Returns the same weights as a transformers model on the CPU."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        write_policy(path, model, jax.tree.map(np.asarray, params), dtype="float32")
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()


def time_generate(
    peer: Any, prompts: Sequence[np.ndarray], new_tokens: int, seed: int
) -> tuple[float, int]:
    """Times one sampled generation of exactly `new_tokens` a prompt; returns seconds and tokens.

    Prompts must have one length: padding would cost the peer work that ours does not have.
    """
    import torch

    torch.manual_seed(seed)
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    start = time.perf_counter()
    with torch.no_grad():
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    return seconds, int(out.shape[0] * (out.shape[1] - ids.shape[1]))


class PeerUpdate:
    """Policy-gradient updates of a transformers model with AdamW.

    Args:
      peer: the model, in float32 or bfloat16 (then under autocast with float32 weights).
      learning_rate: of AdamW.
      rows: documents in one forward pass.
    """

    def __init__(self, peer: Any, learning_rate: float, rows: int):
        import torch

        self.peer, self.rows = peer.train(), rows
        self.optimizer = torch.optim.AdamW(
            peer.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def __call__(self, samples: Sequence[Sample]) -> float:
        """Takes one update on all samples; returns the seconds it took."""
        import torch

        total = float(sum(len(s.reply) for s in samples))
        ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.reply))
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        for first in range(0, len(ordered), self.rows):
            part = ordered[first : first + self.rows]
            width = max(len(s.prompt) + len(s.reply) for s in part)
            ids = np.zeros((len(part), width), np.int64)
            seen = np.zeros((len(part), width), np.int64)
            weight = np.zeros((len(part), width - 1), np.float32)
            for i, s in enumerate(part):
                p, n = len(s.prompt), len(s.prompt) + len(s.reply)
                ids[i, :n] = np.concatenate([s.prompt, s.reply])
                seen[i, :n] = 1
                weight[i, p - 1 : n - 1] = s.advantage / total
            logits = self.peer(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(seen),
                logits_to_keep=width - min(len(s.prompt) - 1 for s in part),
            ).logits
            labels = torch.from_numpy(ids[:, 1:])
            used = logits[:, :-1].float()
            offset = labels.shape[1] - used.shape[1]
            logp = -torch.nn.functional.cross_entropy(
                used.reshape(-1, used.shape[-1]), labels[:, offset:].reshape(-1), reduction="none"
            )
            loss = -(logp * torch.from_numpy(weight[:, offset:].reshape(-1))).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.peer.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - start
