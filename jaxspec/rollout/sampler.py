"""The host's side of a rollout: buckets, masked left-over places, one program a bucket."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.drafts.base import Draft, DraftWeights
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.rollout import speculative
from jaxspec.rollout.config import RolloutConfig, RolloutResult


@functools.cache
def _layout_program(model: ModelConfig, mesh: Mesh, compute_dtype: str):
    """Compiles the layout of the layers for decoding once for all samplers of a policy."""
    whole = PartitionSpec()
    lay_out = functools.partial(
        policy.decode_layers, num_layers=model.num_layers, compute_dtype=compute_dtype
    )
    return jax.jit(jax.shard_map(lay_out, mesh=mesh, in_specs=whole, out_specs=whole))


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Generates replies with compiled programs of fixed shapes.

    Attributes:
      model: the policy's shape.
      config: rollout settings.
      mesh: sequences are split over its data axis.
      stop_ids: ids that end a reply.
      draft: the draft's functions; None decodes plainly.
      compute_dtype: dtype of matrix products and caches.
    """

    model: ModelConfig
    config: RolloutConfig
    mesh: Mesh
    stop_ids: tuple[int, ...]
    draft: Draft | None = None
    compute_dtype: str = "float32"

    def __post_init__(self):
        devices = self.mesh.shape["data"]
        if self.config.batch_size % devices:
            raise ValueError(
                f"RolloutConfig.batch_size={self.config.batch_size} is not a multiple of the "
                f"{devices} devices of MeshConfig.data"
            )
        longest = self.config.prompt_buckets[-1] + self.config.max_new_tokens
        if longest > self.model.max_position_embeddings:
            raise ValueError(
                f"RolloutConfig.prompt_buckets up to {self.config.prompt_buckets[-1]} and "
                f"max_new_tokens={self.config.max_new_tokens} make {longest} positions; the policy "
                f"has {self.model.max_position_embeddings} (max_position_embeddings)"
            )
        outside = [i for i in self.stop_ids if not 0 <= i < self.model.vocab_size]
        if outside:
            raise ValueError(
                f"stop ids {outside} lie outside the vocabulary of {self.model.vocab_size}"
            )

    @functools.cached_property
    def _programs(self):
        """The compiled prefill and decoding; shapes decide how often each is compiled."""
        # With no draft there is nothing to propose, whatever the setting says.
        drafted = self.config.num_draft_tokens if self.draft is not None else 0
        generation = speculative.Generation(
            model=self.model,
            draft=self.draft if drafted else None,
            config=dataclasses.replace(self.config, num_draft_tokens=drafted),
            stop_ids=tuple(self.stop_ids),
            compute_dtype=self.compute_dtype,
        )
        whole, split = PartitionSpec(), PartitionSpec("data")
        sharded = functools.partial(jax.shard_map, mesh=self.mesh, out_specs=split, check_vma=True)
        prefill = sharded(
            generation.prefill, in_specs=(whole, whole, split, split, split, split, whole)
        )
        decode = sharded(generation.decode, in_specs=(whole, whole, split, split, whole))
        # The caches stay where prefill left them.
        return jax.jit(prefill), jax.jit(decode, donate_argnums=(2,))

    def prepare(self, policy_params: Any) -> policy.DecodeParams:
        """Lays the policy out for decoding, once for any number of calls with these parameters."""
        lay_out = _layout_program(self.model, self.mesh, self.compute_dtype)
        return policy.DecodeParams(params=policy_params, layers=lay_out(policy_params["layers"]))

    def compilations(self) -> int:
        """Returns how many generation programs were compiled so far."""
        return sum(program._cache_size() for program in self._programs)

    def __call__(
        self,
        policy_params: Any,
        draft_weights: DraftWeights | None,
        prompts: Sequence[np.ndarray],
        key: jax.Array,
        *,
        samples_per_prompt: int = 1,
        first_row_id: int = 0,
        max_new_tokens: int | None = None,
    ) -> RolloutResult:
        """Generates `samples_per_prompt` replies to each prompt, in order.

        Args:
          policy_params: the policy's parameters, or what `prepare` made of them.
          draft_weights: the draft, when the sampler has one.
          prompts: token ids of each prompt.
          key: typed key; a sequence's draws depend on it and on the sequence's id alone.
          samples_per_prompt: replies to each prompt; divides the batch of a device.
          first_row_id: id of the first sequence.
          max_new_tokens: cap for this call, at most the configured one.

        Returns:
          Host arrays for len(prompts) * samples_per_prompt sequences.

        Raises:
          ValueError: for no prompts, an empty or over-long prompt, ids outside the vocabulary, a
            cap beyond the configured one, or counts that do not divide.
        """
        cap = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._check(prompts, samples_per_prompt, cap, draft_weights)
        per_call = self.config.batch_size // samples_per_prompt
        if not self.draft or not self.config.num_draft_tokens:
            draft_weights = None
        prepared = policy_params
        if not isinstance(prepared, policy.DecodeParams):
            prepared = self.prepare(policy_params)
        # A key of the state lies on the mesh, a fresh one does not: one program serves both.
        key = jax.device_put(key, NamedSharding(self.mesh, PartitionSpec()))
        # Only the prompts of one call share a bucket, so that one long prompt slows one call.
        results = []
        for start in range(0, len(prompts), per_call):
            part = prompts[start : start + per_call]
            longest = max(len(p) for p in part)
            bucket = next(b for b in self.config.prompt_buckets if b >= longest)
            padded = np.zeros((per_call, bucket), np.int32)
            lengths = np.ones(per_call, np.int32)
            for i, prompt in enumerate(part):
                padded[i, : len(prompt)] = prompt
                lengths[i] = len(prompt)
            used = np.repeat(np.arange(per_call) < len(part), samples_per_prompt)
            budgets = np.where(used, cap, 0).astype(np.int32)
            ids = np.arange(self.config.batch_size, dtype=np.int32)
            ids += first_row_id + start * samples_per_prompt
            prefill, decode = self._programs
            state = prefill(prepared.params, draft_weights, padded, lengths, ids, budgets, key)
            out = decode(prepared, draft_weights, state, ids, key).result
            keep = len(part) * samples_per_prompt
            results.append(jax.tree.map(lambda x: np.asarray(x)[:keep], out))  # noqa: B023
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)

    def _check(self, prompts, samples_per_prompt, cap, draft_weights):
        config, devices = self.config, self.mesh.shape["data"]
        if not len(prompts):
            raise ValueError("there are no prompts to reply to")
        if not 1 <= cap <= config.max_new_tokens:
            raise ValueError(
                f"max_new_tokens={cap} is not within 1..{config.max_new_tokens} "
                "(RolloutConfig.max_new_tokens)"
            )
        if samples_per_prompt < 1 or (config.batch_size // devices) % samples_per_prompt:
            raise ValueError(
                f"{samples_per_prompt} samples per prompt do not divide the "
                f"{config.batch_size // devices} sequences of a device "
                f"(RolloutConfig.batch_size={config.batch_size}, MeshConfig.data={devices})"
            )
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty")
            if len(prompt) > config.prompt_buckets[-1]:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens and the longest of "
                    f"RolloutConfig.prompt_buckets is {config.prompt_buckets[-1]}"
                )
            if np.min(prompt) < 0 or np.max(prompt) >= self.model.vocab_size:
                raise ValueError(
                    f"prompt {i} has ids outside the vocabulary of {self.model.vocab_size}"
                )
        if self.draft is not None and config.num_draft_tokens and draft_weights is None:
            raise ValueError("the sampler was built with a draft; pass its weights")
