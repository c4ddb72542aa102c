"""Optimisers with their own schedule and clip: one for the policy, one for the draft."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.params import Table, abstract_params, named_shardings

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with warm-up, a schedule and its own global-norm clip.

    Attributes:
      learning_rate: peak learning rate.
      warmup_steps: steps over which the rate rises linearly from learning_rate / warmup_steps.
      schedule: what follows: "constant", or "linear" or "cosine" decay until `decay_steps`.
      decay_steps: step at which a decaying schedule reaches its end.
      final_fraction: learning rate at the end of the decay, as a fraction of the peak.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay, applied to matrices only.
      clip_norm: largest global norm of the gradient.
    """

    learning_rate: float
    warmup_steps: int = 0
    schedule: str = "constant"
    decay_steps: int | None = None
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        if not 0 <= self.learning_rate < 1e3:
            raise ValueError(
                f"OptimizerConfig.learning_rate={self.learning_rate} is not within 0..1000"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"OptimizerConfig.schedule is {self.schedule!r}; known schedules: {SCHEDULES}"
            )
        if self.schedule != "constant" and (
            self.decay_steps is None or self.decay_steps <= self.warmup_steps
        ):
            raise ValueError(
                f"OptimizerConfig.decay_steps={self.decay_steps} must exceed warmup_steps="
                f"{self.warmup_steps} for the {self.schedule} schedule"
            )
        if self.clip_norm <= 0:
            raise ValueError(f"OptimizerConfig.clip_norm={self.clip_norm} must be positive")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"OptimizerConfig.{name}={getattr(self, name)} is not in [0, 1)")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates made."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        steps = config.decay_steps - warmup
        after = optax.linear_schedule(peak, peak * config.final_fraction, steps)
    else:
        steps = config.decay_steps - warmup
        after = optax.cosine_decay_schedule(peak, steps, config.final_fraction)
    if not warmup:
        return after
    ramp = optax.linear_schedule(peak / warmup, peak, warmup)
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds clip, Adam, decay and schedule as one transformation."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


def optimizer_shardings(optimizer: optax.GradientTransformation, table: Table, mesh: Mesh) -> Any:
    """Returns shardings for the optimiser's state: moments lie like their parameters."""
    state = jax.eval_shape(optimizer.init, abstract_params(table))
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        named_shardings(table, mesh),
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def init_optimizer(
    optimizer: optax.GradientTransformation, params: Any, table: Table, mesh: Mesh
) -> Any:
    """Makes the optimiser's state, each array born in its own sharding."""
    shardings = optimizer_shardings(optimizer, table, mesh)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def all_finite(*trees: Any) -> jax.Array:
    """Returns whether every entry of every floating array is finite (bool scalar)."""
    leaves = jax.tree.leaves(trees)
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
