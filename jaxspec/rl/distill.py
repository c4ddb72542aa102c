"""Fitting a draft alone, on features of the policy that were computed once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxspec import compat
from jaxspec.drafts.base import Draft, target_view
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import PackedBatch
from jaxspec.params import named_shardings, partition_specs
from jaxspec.rl.forward import Features, gather, reduce_gradients, sum_over_data
from jaxspec.rl.optimizers import all_finite, optimizer_shardings
from jaxspec.rl.state import ModelState
from jaxspec.rl.step import Metrics, update_model


def make_distill_step(
    model: ModelConfig,
    draft: Draft,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    compute_dtype: str = "float32",
) -> Callable[..., tuple[ModelState, Metrics]]:
    """Builds the jitted step that fits a draft to cached features.

    Returns:
      `step(draft_state, buffers, outer, features, batch) -> (draft_state, metrics)`; `outer` holds
      the policy's parameters outside its layers, `features` come from `forward.make_features`,
      both they and `batch` are [row, token]. The draft's state is donated. Metrics are global
      (numerator, denominator) pairs.
    """
    policy_specs = partition_specs(policy.param_table(model), mesh)
    outer_specs = {name: spec for name, spec in policy_specs.items() if name != "layers"}
    draft_specs = partition_specs(draft.param_table(), mesh)

    def gradients(params: Any, buffers: Any, outer: Any, features: Features, rows: PackedBatch):
        outer = gather(outer, outer_specs)
        view = target_view(
            outer["embed"],
            policy.head(outer),
            features.taps,
            features.hidden,
            features.log_normaliser,
        )
        denominator = sum_over_data(draft.distill_denominator(rows))

        def loss(params: Any):
            output = draft.distill(
                gather(params, draft_specs),
                buffers,
                view,
                rows,
                compute_dtype=compute_dtype,
            )
            return output.numerator / jnp.maximum(denominator, 1.0), output.metrics

        local = compat.vary(params, ("data",))
        grads, metrics = jax.grad(loss, has_aux=True)(local)
        return (
            reduce_gradients(grads, draft_specs),
            sum_over_data(metrics),
        )

    whole, rows = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(draft_specs, whole, outer_specs, rows, rows),
        out_specs=(draft_specs, whole),
        check_vma=True,
    )

    def step(
        state: ModelState, buffers: Any, outer: Any, features: Features, batch: PackedBatch
    ) -> tuple[ModelState, Metrics]:
        grads, metrics = mapped(state.params, buffers, outer, features, batch)
        norm = optax.tree.norm(grads)
        metrics = dict(metrics) | {"draft_grad_norm": (norm, jnp.float32(1))}
        return update_model(state, grads, optimizer, all_finite(norm, metrics)), metrics

    table = draft.param_table()
    shardings = ModelState(
        params=named_shardings(table, mesh), opt_state=optimizer_shardings(optimizer, table, mesh)
    )
    return jax.jit(step, donate_argnums=(0,), out_shardings=(shardings, None))
