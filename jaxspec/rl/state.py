"""What one co-training step takes and gives back."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.drafts.base import DraftWeights
from jaxspec.params import Table, abstract_params
from jaxspec.rl.optimizers import init_optimizer, optimizer_shardings


@flax.struct.dataclass
class ModelState:
    """One model's trained parameters and the state of its own optimiser."""

    params: Any
    opt_state: Any


@flax.struct.dataclass
class CoTrainState:
    """Everything that a step changes, and nothing else.

    Attributes:
      step: i32 scalar, updates made (skipped ones counted).
      key: typed PRNG key of the run; draws fold in what identifies them.
      policy: `ModelState` of the policy.
      draft: `ModelState` of the draft, or None when there is no draft.
      draft_buffers: the draft's constants (its vocabulary).
      nonfinite_in_a_row: i32 scalar, updates skipped since the last one that was made.
    """

    # Any, because tree transformations rebuild the class around specs and shapes.
    step: Any
    key: Any
    policy: Any
    draft: Any
    draft_buffers: Any
    nonfinite_in_a_row: Any

    @property
    def draft_weights(self) -> DraftWeights | None:
        """The draft as rollouts and exports take it."""
        if self.draft is None:
            return None
        return DraftWeights(params=self.draft.params, buffers=self.draft_buffers)


def init_state(
    key: jax.Array,
    policy_params: Any,
    policy_table: Table,
    policy_optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    draft_weights: DraftWeights | None = None,
    draft_table: Table | None = None,
    draft_optimizer: optax.GradientTransformation | None = None,
) -> CoTrainState:
    """Builds the state before the first step; parameters must already be placed on the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def scalar(value: int) -> jax.Array:
        return jax.device_put(jnp.asarray(value, jnp.int32), replicated)

    draft, buffers = None, {}
    if draft_weights is not None:
        opt_state = init_optimizer(draft_optimizer, draft_weights.params, draft_table, mesh)
        draft = ModelState(params=draft_weights.params, opt_state=opt_state)
        buffers = jax.device_put(draft_weights.buffers, replicated)
    policy_opt_state = init_optimizer(policy_optimizer, policy_params, policy_table, mesh)
    return CoTrainState(
        step=scalar(0),
        key=jax.device_put(key, replicated),
        policy=ModelState(params=policy_params, opt_state=policy_opt_state),
        draft=draft,
        draft_buffers=buffers,
        nonfinite_in_a_row=scalar(0),
    )


def abstract_state(
    policy_table: Table,
    policy_optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    draft_table: Table | None = None,
    draft_buffer_table: Table | None = None,
    draft_optimizer: optax.GradientTransformation | None = None,
) -> CoTrainState:
    """Describes the state with shapes, dtypes and shardings, for restoring a checkpoint."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def model(table: Table, optimizer: optax.GradientTransformation) -> ModelState:
        shapes = jax.eval_shape(optimizer.init, abstract_params(table))
        opt_state = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            optimizer_shardings(optimizer, table, mesh),
        )
        return ModelState(params=abstract_params(table, mesh), opt_state=opt_state)

    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return CoTrainState(
        step=scalar,
        key=jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated),
        policy=model(policy_table, policy_optimizer),
        draft=None if draft_table is None else model(draft_table, draft_optimizer),
        draft_buffers={} if draft_table is None else abstract_params(draft_buffer_table, mesh),
        nonfinite_in_a_row=scalar,
    )
