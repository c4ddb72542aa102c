"""From an experiment to everything a run needs: model, tokenizer, draft, programs."""

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxspec.config import Experiment
from jaxspec.drafts.base import Draft
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.io.policy import PACKAGE, load_policy
from jaxspec.io.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from jaxspec.mesh import make_mesh
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.params import Table, count_params, init_params, partition_specs, place_params
from jaxspec.rl.optimizers import make_optimizer
from jaxspec.rl.step import make_rl_step
from jaxspec.rollout.sampler import Sampler


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays fixed during a run; programs are built on first use.

    Attributes:
      experiment: its settings.
      model: the policy's shape.
      tokenizer: text to ids and back.
      mesh: devices.
      draft: the draft's functions, or None.
      compute_dtype: dtype of the matrix products' inputs.
    """

    experiment: Experiment
    model: ModelConfig
    tokenizer: Tokenizer
    mesh: Mesh
    draft: Draft | None
    compute_dtype: str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        return tuple(self.model.eos_token_ids) or tuple(self.tokenizer.eos_token_ids)

    @functools.cached_property
    def policy_table(self) -> Table:
        """Describes the policy's parameters."""
        return policy.param_table(self.model)

    @functools.cached_property
    def policy_optimizer(self) -> optax.GradientTransformation:
        """The policy's own optimiser."""
        return make_optimizer(self.experiment.policy_optimizer)

    @functools.cached_property
    def draft_optimizer(self) -> optax.GradientTransformation | None:
        """The draft's own optimiser."""
        return make_optimizer(self.experiment.draft.optimizer) if self.draft else None

    @property
    def num_ahead(self) -> int:
        """Tokens that packing looks ahead."""
        return self.draft.num_ahead if self.draft else 1

    def sampler(
        self,
        *,
        batch_size: int | None = None,
        num_draft_tokens: int | None = None,
        with_draft: bool = True,
    ) -> Sampler:
        """Returns a sampler, by default the run's own; the same settings give the same programs."""
        rollout = self.experiment.rollout
        size = rollout.batch_size if batch_size is None else batch_size
        drafted = rollout.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        with_draft = with_draft and self.draft is not None
        return self._samplers(size, drafted if with_draft else 0)

    @functools.cached_property
    def _samplers(self):
        @functools.cache
        def build(batch_size: int, num_draft_tokens: int) -> Sampler:
            mesh = self.mesh
            if batch_size % mesh.shape["data"]:
                raise ValueError(
                    f"a rollout of {batch_size} sequences does not divide over MeshConfig.data="
                    f"{mesh.shape['data']} devices"
                )
            return Sampler(
                self.model,
                dataclasses.replace(
                    self.experiment.rollout,
                    batch_size=batch_size,
                    num_draft_tokens=num_draft_tokens,
                ),
                mesh,
                self.stop_ids,
                self.draft if num_draft_tokens else None,
                self.compute_dtype,
            )

        return build

    @functools.cached_property
    def rl_step(self):
        """The jitted co-training step."""
        return make_rl_step(
            self.model,
            self.draft,
            self.experiment.step,
            self.policy_optimizer,
            self.draft_optimizer,
            self.mesh,
            temperature=self.experiment.rollout.sampling.temperature,
            compute_dtype=self.compute_dtype,
        )

    def encode_prompt(self, item: Any) -> np.ndarray:
        """Returns the ids of a task item's prompt, in the chat template's form."""
        text = self.tokenizer.apply_chat_template(item.messages)
        return np.asarray(self.tokenizer.encode(text), np.int32)


def build(experiment: Experiment) -> tuple[Run, Any]:
    """Loads or initialises the policy and builds the run around it.

    Returns:
      The run, and the policy's parameters placed on the mesh.

    Raises:
      ValueError: naming what does not fit.
    """
    mesh = make_mesh(experiment.mesh)
    source = experiment.policy.source
    if source:
        loaded = load_policy(source)
        model, tokenizer = loaded.config, load_tokenizer(loaded.tokenizer_source)
        _check_expected(experiment.policy.model, model, source)
        table = policy.param_table(model)
        partition_specs(table, mesh)
        params = place_params(table, loaded.params, mesh)
    else:
        model, tokenizer = _fresh_model(experiment)
        table = policy.param_table(model)
        key = jax.random.fold_in(jax.random.key(experiment.training.seed), 1)
        params = init_params(table, key, mesh)
    return _assemble(experiment, model, tokenizer, mesh), params


def describe(experiment: Experiment) -> tuple[ModelConfig, Mesh, Draft | None]:
    """Returns shapes without weights, checking every one: what a dry run needs."""
    mesh = make_mesh(experiment.mesh)
    expected = experiment.policy.model
    if experiment.policy.source and expected is not None:
        model = expected
    elif experiment.policy.source:
        model = load_policy(experiment.policy.source).config
    else:
        model, _ = _fresh_model(experiment)
    partition_specs(policy.param_table(model), mesh)
    draft = make_draft(experiment, model)
    if draft is not None:
        partition_specs(draft.param_table(), mesh)
    _check_positions(experiment, model)
    return model, mesh, draft


def _assemble(experiment, model, tokenizer, mesh) -> Run:
    draft = make_draft(experiment, model)
    if draft is not None:
        partition_specs(draft.param_table(), mesh)
    _check_positions(experiment, model)
    dtype = experiment.compute_dtype
    dtype = probe_compute_dtype(model) if dtype == "auto" else dtype
    return Run(experiment, model, tokenizer, mesh, draft, dtype)


def make_draft(experiment: Experiment, model: ModelConfig) -> Draft | None:
    """Builds the draft's functions for a policy."""
    settings = experiment.draft
    if not settings.enabled:
        return None
    config = Eagle3Config.from_policy(
        model,
        num_passes=settings.num_passes or experiment.rollout.num_draft_tokens,
        tap_layers=settings.tap_layers or None,
        draft_vocab_size=settings.vocab_size or None,
        intermediate_size=settings.intermediate_size or None,
        num_heads=settings.num_heads or None,
        num_kv_heads=settings.num_kv_heads or None,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
        objective=settings.objective,
        pass_weights=settings.pass_weights,
    )
    if settings.source:
        config = _stored_draft(settings.source, model, config)
    return Eagle3(config)


def _stored_draft(source: str, model: ModelConfig, wanted: Eagle3Config) -> Eagle3Config:
    """A stored draft's own shape wins; passes, weights and objective are this run's."""
    from jaxspec.io.draft_formats import read_eagle3

    stored, _ = read_eagle3(source, model)
    return dataclasses.replace(
        stored,
        num_passes=wanted.num_passes,
        pass_weights=wanted.pass_weights,
        objective=wanted.objective,
    )


def _fresh_model(experiment: Experiment) -> tuple[ModelConfig, Tokenizer]:
    tokenizer = character_tokenizer(experiment.policy.alphabet)
    model = experiment.policy.model
    if model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"ModelConfig.vocab_size={model.vocab_size} is less than the {tokenizer.vocab_size} "
            "ids of PolicyConfig.alphabet and its special tokens"
        )
    model = dataclasses.replace(
        model,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


def _check_expected(expected: ModelConfig | None, found: ModelConfig, source: str) -> None:
    if expected is None:
        return
    differing = [
        f"{field.name} is {getattr(found, field.name)}, expected {getattr(expected, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if not field.name.endswith(("_id", "_ids"))
        and getattr(found, field.name) != getattr(expected, field.name)
    ]
    if differing:
        raise ValueError(
            f"{source} is not the policy of PolicyConfig.model: {'; '.join(differing)}"
        )


def _check_positions(experiment: Experiment, model: ModelConfig) -> None:
    rollout = experiment.rollout
    longest = rollout.prompt_buckets[-1] + rollout.max_new_tokens
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"RolloutConfig.prompt_buckets up to {rollout.prompt_buckets[-1]} and max_new_tokens="
            f"{rollout.max_new_tokens} make {longest} positions; the policy has "
            f"{model.max_position_embeddings} (ModelConfig.max_position_embeddings)"
        )


def probe_compute_dtype(model: ModelConfig) -> str:
    """Returns the dtype in which this machine multiplies the policy's matrices faster."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    calls, seconds = {}, {}
    for dtype in ("float32", "bfloat16"):
        x = jnp.ones((256, model.hidden_size), dtype)
        w = jnp.ones((model.hidden_size, model.intermediate_size), dtype)
        multiply = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
        calls[dtype] = functools.partial(multiply, x, w)
        calls[dtype]().block_until_ready()
        seconds[dtype] = float("inf")
    # In turns and the best of many, so that other work on the machine does not decide.
    for _ in range(20):
        for dtype, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    # Half the rounding error is worth a little time.
    return "bfloat16" if seconds["bfloat16"] < 0.8 * seconds["float32"] else "float32"


def dry_run_table(experiment: Experiment) -> dict[str, str]:
    """Returns what a dry run prints: parameters, memory per device and the mesh."""
    model, mesh, draft = describe(experiment)
    devices = mesh.shape["data"]
    count = count_params(policy.param_table(model))
    draft_count = count_params(draft.param_table()) if draft else 0
    rollout, packing = experiment.rollout, experiment.packing
    bytes_each = 2 if experiment.compute_dtype == "bfloat16" else 4
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * bytes_each
    kept = _kept_per_layer(model)[experiment.step.remat]
    rows = packing.rows_per_microbatch // devices
    activations = 4 * rows * packing.row_length * kept * model.num_layers
    logits = 4 * experiment.step.logprob_chunk * model.vocab_size * 2

    def size(number: Any) -> str:
        return f"{number / 2**30:.2f} GiB"

    trained = count + draft_count
    parts = {
        "parameters and two moments": 12 * trained / devices,
        "gradients": 4 * trained / devices,
        "gathered for rollouts": 4 * trained if devices > 1 else 0,
        "weights laid out for decoding": bytes_each * count,
        "activations": activations,
        "logits of one chunk": logits,
        "rollout cache": kv * rollout.slots * rollout.batch_size / devices,
    }
    sizes = {"policy parameters": f"{count:,} ({model.family}, {model.num_layers} layers)"}
    if draft is not None:
        sizes["draft parameters"] = f"{draft_count:,} (taps {draft.tap_layers})"
    sizes["mesh"] = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
    sizes |= {f"memory: {name}": size(value) for name, value in parts.items()}
    sizes["memory per device, estimated"] = size(sum(parts.values()))
    replies = experiment.training.prompts_per_step * experiment.training.samples_per_prompt
    calls = math.ceil(replies / rollout.batch_size)
    sizes["a step"] = f"{replies} replies in {calls} rollout calls"
    return sizes


def _kept_per_layer(model: ModelConfig) -> dict[str, int]:
    """Returns how many numbers a layer stores for a token's backward pass, by remat setting."""
    dim, ffn = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = 2 * dim + 2 * q + 2 * kv + 2 * ffn
    return {"none": products + 7 * dim + q + 4 * ffn, "products": products, "layer": dim}


def source_name(experiment: Experiment) -> str:
    """Returns the policy's name for reports and exports."""
    source = experiment.policy.source
    if not source:
        return "fresh policy"
    return source.removeprefix(PACKAGE) if source.startswith(PACKAGE) else Path(source).name
