"""Replies to text from a stored policy, with or without a stored draft."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.drafts.base import DraftWeights
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.io.draft_formats import read_eagle3
from jaxspec.io.policy import load_policy
from jaxspec.io.tokenizer import Tokenizer, load_tokenizer
from jaxspec.mesh import MeshConfig, make_mesh
from jaxspec.models import policy
from jaxspec.models.policy import DecodeParams
from jaxspec.params import place_params
from jaxspec.rollout.config import RolloutConfig, RolloutResult
from jaxspec.rollout.metrics import acceptance_metrics
from jaxspec.rollout.processors import SamplingConfig
from jaxspec.rollout.sampler import Sampler


@dataclasses.dataclass(frozen=True)
class Answered:
    """Replies to prompts.

    Attributes:
      texts: the replies.
      result: tokens, log-probabilities and acceptance.
      seconds: time of the rollout.
      metrics: tokens a second, and acceptance by position where there is a draft.
    """

    texts: list[str]
    result: RolloutResult
    seconds: float
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Generator:
    """A loaded policy, perhaps with a draft, that replies to text.

    Attributes:
      tokenizer: text to ids and back.
      sampler: the compiled rollout.
      policy: its parameters, laid out for decoding.
      draft_weights: the draft, or None.
    """

    tokenizer: Tokenizer
    sampler: Sampler
    policy: DecodeParams
    draft_weights: DraftWeights | None

    def __call__(
        self, prompts: Sequence[str], *, chat: bool = True, system: str = "", seed: int = 0
    ) -> Answered:
        """Replies to each prompt.

        Args:
          prompts: texts; each is one user message when `chat`, else the raw text to continue.
          chat: wrap prompts in the tokenizer's chat template.
          system: system message of the chat; the template's own when empty.
          seed: of every draw.

        Raises:
          ValueError: for no prompts, or one that is empty or too long.
        """
        ids = [self._encode(text, chat, system, i) for i, text in enumerate(prompts)]
        start = time.perf_counter()
        result = self.sampler(self.policy, self.draft_weights, ids, jax.random.key(seed))
        seconds = time.perf_counter() - start
        stops = set(self.sampler.stop_ids)
        texts = [
            self.tokenizer.decode([t for t in row[:n].tolist() if t not in stops])
            for row, n in zip(result.tokens, result.lengths, strict=True)
        ]
        tokens = int(result.lengths.sum())
        metrics = {"tokens": float(tokens), "tokens_per_second": tokens / seconds}
        if result.accepted.shape[1]:
            metrics |= acceptance_metrics(
                int(result.verifies.sum()),
                result.accepted.sum(axis=0).tolist(),
                int((result.lengths - 1).sum()),
            )
        return Answered(texts=texts, result=result, seconds=seconds, metrics=metrics)

    def _encode(self, text: str, chat: bool, system: str, index: int) -> np.ndarray:
        if not text.strip():
            raise ValueError(f"prompt {index} is empty")
        if chat:
            messages = [{"role": "system", "content": system}] if system else []
            text = self.tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": text}]
            )
        return np.asarray(self.tokenizer.encode(text), np.int32)


def load_generator(
    policy_source: str,
    draft_source: str = "",
    *,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    prompt_buckets: tuple[int, ...] = (64, 256, 1024),
    num_draft_tokens: int = 3,
    draft_temperature: float = 1.0,
    sampling: SamplingConfig | None = None,
    compute_dtype: str = "auto",
    mesh: MeshConfig | None = None,
) -> Generator:
    """Loads a policy and, if named, its draft.

    Args:
      policy_source: a Hugging Face folder, a .gguf file or "package:NAME".
      draft_source: an EAGLE-3 folder; "" decodes plainly.
      max_new_tokens: most tokens in a reply.
      batch_size: prompts replied to at once.
      prompt_buckets: prompt lengths programs are compiled for; those that do not fit the policy's
        positions are left out.
      num_draft_tokens: tokens proposed before each verify.
      draft_temperature: temperature of the draft's draws; 0 proposes its arg-max.
      sampling: how tokens are drawn; temperature 1 when None.
      compute_dtype: "float32", "bfloat16" or "auto".
      mesh: devices; one when None.

    Raises:
      ValueError: if the draft was made for another policy, or anything stored is broken.
    """
    from jaxspec.training.setup import probe_compute_dtype

    loaded = load_policy(policy_source)
    devices = make_mesh(mesh or MeshConfig())
    draft, weights = None, None
    if draft_source:
        config, weights = read_eagle3(draft_source, loaded.config)
        draft = Eagle3(config)
        weights = DraftWeights(
            params=place_params(draft.param_table(), weights.params, devices),
            buffers=place_params(draft.buffer_table(), weights.buffers, devices),
        )
    room = loaded.config.max_position_embeddings - max_new_tokens
    buckets = tuple(b for b in prompt_buckets if b <= room) or (max(room, 1),)
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    if compute_dtype == "auto":
        compute_dtype = probe_compute_dtype(loaded.config)
    sampler = Sampler(
        loaded.config,
        RolloutConfig(
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            prompt_buckets=buckets,
            num_draft_tokens=num_draft_tokens if draft else 0,
            draft_temperature=draft_temperature,
            sampling=sampling or SamplingConfig(),
        ),
        devices,
        tuple(loaded.config.eos_token_ids) or tuple(tokenizer.eos_token_ids),
        draft,
        compute_dtype,
    )
    params = place_params(policy.param_table(loaded.config), loaded.params, devices)
    return Generator(tokenizer, sampler, sampler.prepare(params), weights)


def read_prompts(text: str, source: str) -> list[str]:
    """Returns the prompts of a file, one a line; blank lines are left out.

    Raises:
      ValueError: if there is none.
    """
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{source} holds no prompts; write one a line")
    return prompts
