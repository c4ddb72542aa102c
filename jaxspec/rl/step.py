"""One co-training step: policy loss and draft loss on one forward, two gradients, two updates.

The step is a pure function. Gradients are computed with the mesh fully manual: every device
differentiates the numerators of its own rows over global denominators, accumulates over
microbatches, and reduces once. The updates are elementwise.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxspec import compat
from jaxspec.drafts.base import Draft, DraftWeights
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import PackedBatch
from jaxspec.params import partition_specs
from jaxspec.rl.forward import (
    gather,
    reduce_gradients,
    score,
    sum_over_data,
    zeros_like_shapes,
)
from jaxspec.rl.losses import MAXIMA, LossConfig, policy_loss
from jaxspec.rl.optimizers import all_finite
from jaxspec.rl.state import CoTrainState, ModelState, abstract_state

Metrics = dict[str, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of the update.

    Attributes:
      loss: the policy's objective.
      draft_weight: weight of the draft's loss. Policy and draft share no parameter, so it scales
        the draft's gradient alone.
      remat: what of the policy's layers the backward pass computes again instead of storing it:
        "none", "products" (all but matrix products and attention) or "layer".
      logprob_chunk: rows whose logits exist at one time.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    draft_weight: float = 1.0
    remat: str = "products"
    logprob_chunk: int = 256

    def __post_init__(self):
        if self.draft_weight < 0:
            raise ValueError(f"StepConfig.draft_weight={self.draft_weight} is negative")
        policy.check_remat(self.remat)
        if self.logprob_chunk < 1:
            raise ValueError(f"StepConfig.logprob_chunk={self.logprob_chunk} must be positive")


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is fixed while a step is traced."""

    model: ModelConfig
    draft: Draft | None
    config: StepConfig
    mesh: Mesh
    temperature: float
    compute_dtype: str

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        """How the parameters of policy and draft are split."""
        tables = {"policy": policy.param_table(self.model)}
        if self.draft is not None:
            tables["draft"] = self.draft.param_table()
        return {name: partition_specs(table, self.mesh) for name, table in tables.items()}


def make_rl_step(
    model: ModelConfig,
    draft: Draft | None,
    config: StepConfig,
    policy_optimizer: optax.GradientTransformation,
    draft_optimizer: optax.GradientTransformation | None,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    compute_dtype: str = "float32",
) -> Callable[..., tuple[CoTrainState, Metrics]]:
    """Builds the jitted step.

    Args:
      model: the policy's shape.
      draft: the draft's functions, or None to train the policy alone.
      config: settings of the update.
      policy_optimizer: the policy's own optimiser.
      draft_optimizer: the draft's own optimiser.
      mesh: rows are split over its data axis.
      temperature: what the rollout's logits were divided by; log-probabilities are recomputed so.
      compute_dtype: dtype of the matrix products' inputs.

    Returns:
      `step(state, batch, num_microbatches, policy_denominator, frozen_draft=None,
      reference_params=None, update_draft=True) -> (state, metrics)`. The state is donated. `batch`
      is a PackedBatch [microbatch, row, token] whose rows are split over data; only the first
      `num_microbatches` (i32 scalar) are computed. `policy_denominator` is the global denominator
      of the policy loss. `frozen_draft` is scored on the same rows, its metrics are named frozen_*.
      Metrics are global (numerator, denominator) pairs. An update with a non-finite loss or
      gradient changes nothing but the counters.

    Raises:
      ValueError: for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(
            f"SamplingConfig.temperature={temperature}: training needs rollouts drawn at a "
            "temperature above 0"
        )
    fixed_step = _Step(model, draft, config, mesh, temperature, compute_dtype)
    optimizers = {"policy": policy_optimizer, "draft": draft_optimizer}

    described = abstract_state(
        policy.param_table(model),
        policy_optimizer,
        mesh,
        draft_table=draft.param_table() if draft else None,
        draft_buffer_table=draft.buffer_table() if draft else None,
        draft_optimizer=draft_optimizer,
    )
    # The state comes out lying as it went in, so that the next step is the same program.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, described)

    @functools.partial(
        jax.jit,
        static_argnames=("update_draft",),
        donate_argnums=(0,),
        out_shardings=(shardings, None),
    )
    def step(
        state: CoTrainState,
        batch: PackedBatch,
        num_microbatches: jax.Array,
        policy_denominator: jax.Array,
        *,
        frozen_draft: DraftWeights | None = None,
        reference_params: Any = None,
        update_draft: bool = True,
    ) -> tuple[CoTrainState, Metrics]:
        trained = {"policy": state.policy.params}
        fixed = {"buffers": state.draft_buffers, "frozen": frozen_draft, "draft": None}
        fixed["reference"] = reference_params
        if draft is not None:
            (trained if update_draft else fixed)["draft"] = state.draft.params
        gradients, metrics = _sharded_gradients(fixed_step, trained, fixed)(
            trained, fixed, batch, num_microbatches, policy_denominator
        )
        return _apply(state, gradients, metrics, optimizers)

    return step


def _sharded_gradients(step: _Step, trained: Any, fixed: Any):
    """Wraps `_gradients` in the manual mesh, with parameters lying as the tables say."""
    whole, rows = PartitionSpec(), PartitionSpec(None, "data")
    trained_specs = {name: step.specs[name] for name in trained}
    draft_specs = step.specs.get("draft")
    fixed_specs = {
        "buffers": whole,
        "draft": draft_specs,
        "frozen": DraftWeights(params=draft_specs, buffers=whole),
        "reference": step.specs["policy"],
    }
    fixed_specs = {name: None if fixed[name] is None else fixed_specs[name] for name in fixed}
    return jax.shard_map(
        functools.partial(_gradients, step),
        mesh=step.mesh,
        in_specs=(trained_specs, fixed_specs, rows, whole, whole),
        out_specs=(trained_specs, whole),
        check_vma=True,
    )


def _gradients(step: _Step, trained, fixed, batch, num_microbatches, policy_denominator):
    """Returns global gradients, sharded as the parameters, and global metrics."""
    # Marked as varying, a replicated parameter's gradient stays local until the one sum below.
    local = compat.vary(trained, ("data",))
    denominators = {"policy": jnp.maximum(policy_denominator, 1e-9)}
    if step.draft is not None:
        used = jnp.arange(batch.tokens.shape[0]) < num_microbatches
        masked = batch.replace(ahead_mask=batch.ahead_mask & used[:, None, None, None])
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), masked)
        count = sum_over_data(step.draft.distill_denominator(flat))
        denominators["draft"] = jnp.maximum(count, 1.0)
    differentiate = jax.grad(
        functools.partial(_microbatch_loss, step, fixed=fixed, denominators=denominators),
        has_aux=True,
    )

    def body(i, carry):
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)
        gradients, metrics = differentiate(local, rows)
        return jax.tree.map(jnp.add, carry[0], gradients), add_metrics(carry[1], metrics)

    shapes = jax.eval_shape(differentiate, local, jax.tree.map(lambda x: x[0], batch))
    zeros = zeros_like_shapes(shapes)
    gradients, metrics = jax.lax.fori_loop(0, num_microbatches, body, zeros)
    with jax.named_scope("reduce_gradients"):
        gradients = {
            name: reduce_gradients(gradients[name], step.specs[name]) for name in gradients
        }
        largest = {name: jax.lax.pmax(metrics.pop(name), "data") for name in MAXIMA}
        metrics = sum_over_data(metrics) | largest
    metrics["policy_loss"] = (metrics["policy_loss"][0], policy_denominator)
    return gradients, metrics


def add_metrics(so_far: Metrics, more: Metrics) -> Metrics:
    """Joins the metrics of two microbatches or updates: sums, but for those that are maxima."""
    return {
        name: jax.tree.map(jnp.maximum if name in MAXIMA else jnp.add, so_far[name], pair)
        for name, pair in more.items()
    }


def _microbatch_loss(step: _Step, trained, rows, *, fixed, denominators):
    """Local loss of one microbatch over global denominators, and its metrics' local sums."""
    scored = _score(step, trained["policy"], rows, step.draft.tap_layers if step.draft else ())
    output, mask = scored.logprobs, rows.ahead_mask[..., 0]
    reference = None
    if fixed["reference"] is not None:
        reference = _score(step, jax.lax.stop_gradient(fixed["reference"]), rows, ())
        reference = reference.logprobs.logprobs
    numerator, metrics = policy_loss(
        step.config.loss,
        output.logprobs,
        rows.behaviour_logprobs,
        rows.advantages,
        mask,
        rows.token_weights,
        rows.segment_ids,
        reference_logprobs=reference,
    )
    metrics = dict(metrics)
    metrics["entropy"] = (jnp.sum(output.entropy), jnp.sum(mask).astype(jnp.float32))
    metrics["policy_loss"] = (numerator, jnp.zeros_like(numerator))
    total = numerator / denominators["policy"]
    if step.draft is None:
        return total, jax.lax.stop_gradient(metrics)
    view = scored.target_view()

    def distill(params, buffers):
        return step.draft.distill(
            gather(params, step.specs["draft"]),
            buffers,
            view,
            rows,
            compute_dtype=step.compute_dtype,
        )

    with jax.named_scope("draft_loss"):
        learns = "draft" in trained
        live = distill(trained["draft"] if learns else fixed["draft"], fixed["buffers"])
    metrics |= live.metrics
    if learns:
        total = total + step.config.draft_weight * live.numerator / denominators["draft"]
    if fixed["frozen"] is not None:
        with jax.named_scope("frozen_draft"):
            frozen = jax.lax.stop_gradient(fixed["frozen"])
            kept = distill(frozen.params, frozen.buffers).metrics
        metrics |= {f"frozen_{name}": pair for name, pair in kept.items()}
    return total, jax.lax.stop_gradient(metrics)


def _score(step: _Step, params, rows, taps):
    return score(
        params,
        step.specs["policy"],
        rows,
        step.model,
        taps=taps,
        compute_dtype=step.compute_dtype,
        remat=step.config.remat,
        temperature=step.temperature,
        chunk=step.config.logprob_chunk,
    )


def _apply(state: CoTrainState, gradients, metrics, optimizers):
    """Clips and updates each model by itself, unless something is not finite."""
    metrics = dict(metrics)
    norms = {name: optax.tree.norm(g) for name, g in gradients.items()}
    finite = all_finite(norms, metrics)
    new = {"policy": state.policy, "draft": state.draft}
    with jax.named_scope("update"):
        for name, gradient in gradients.items():
            new[name] = update_model(new[name], gradient, optimizers[name], finite)
            metrics[f"{name}_grad_norm"] = (norms[name], jnp.float32(1))
    skipped = 1 - finite.astype(jnp.int32)
    metrics["skipped_updates"] = (skipped.astype(jnp.float32), jnp.float32(1))
    state = state.replace(
        step=state.step + 1,
        policy=new["policy"],
        draft=new["draft"],
        nonfinite_in_a_row=skipped * (state.nonfinite_in_a_row + 1),
    )
    return state, metrics


def update_model(
    model: ModelState,
    gradient: Any,
    optimizer: optax.GradientTransformation,
    finite: jax.Array,
) -> ModelState:
    """Applies one update, or leaves the model as it was where `finite` is False."""
    updates, opt_state = optimizer.update(gradient, model.opt_state, model.params)
    made = ModelState(params=optax.apply_updates(model.params, updates), opt_state=opt_state)
    return jax.tree.map(functools.partial(jnp.where, finite), made, model)
