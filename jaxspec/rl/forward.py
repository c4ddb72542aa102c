"""The policy on packed rows, with parameters that lie sharded over data."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxspec import compat
from jaxspec.attention import blockwise
from jaxspec.drafts.base import Draft, TargetView, target_view
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import PackedBatch
from jaxspec.params import partition_specs
from jaxspec.rl.logprobs import LogprobOutput, token_logprobs


@flax.struct.dataclass
class Scored:
    """A policy's view of packed rows.

    Attributes:
      logprobs: of every row's label, its entropy and log-normaliser, each [row, token].
      hidden: [row, token, dim] after the final norm.
      taps: [row, token, taps * dim] or None.
      embedding: [vocab, dim], whole.
      head: [vocab, dim], whole.
    """

    logprobs: LogprobOutput
    hidden: Any
    taps: Any
    embedding: Any
    head: Any

    def target_view(self) -> TargetView:
        """Returns what a draft may see, behind stop_gradient."""
        return target_view(
            self.embedding, self.head, self.taps, self.hidden, self.logprobs.log_normaliser
        )


def score(
    params: Any,
    specs: Any,
    rows: PackedBatch,
    model: ModelConfig,
    *,
    taps: tuple[int, ...],
    compute_dtype: str,
    remat: str = "none",
    temperature: float = 1.0,
    chunk: int = 256,
) -> Scored:
    """Runs the policy on packed rows inside the manual mesh and scores every label.

    Args:
      params: this device's part of the parameters.
      specs: how each parameter is split.
      rows: packed rows [row, token] of this device.
      model: the policy's shape.
      taps: layers to tap.
      compute_dtype: dtype of the matrix products' inputs.
      remat: what of a layer the backward pass computes again, see `policy.REMAT`.
      temperature: what logits are divided by before log-probabilities are taken.
      chunk: rows whose logits exist at one time.
    """
    outer = {name: value for name, value in params.items() if name != "layers"}
    whole = gather(outer, specs)
    layer_specs = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}
    output = policy.forward(
        whole | {"layers": params["layers"]},
        model,
        rows.tokens,
        rows.positions,
        lambda q, k, v: blockwise.attend(q, k, v, rows.intervals)[0],
        taps=taps,
        compute_dtype=compute_dtype,
        remat=remat,
        gather=functools.partial(gather, specs=layer_specs),
    )
    head = policy.head(whole)
    shape = rows.tokens.shape
    flat = token_logprobs(
        output.hidden.reshape(-1, output.hidden.shape[-1]),
        head,
        rows.ahead_tokens[..., 0].reshape(-1),
        rows.ahead_mask[..., 0].reshape(-1),
        temperature=temperature,
        compute_dtype=compute_dtype,
        chunk=chunk,
    )
    return Scored(
        logprobs=jax.tree.map(lambda x: x.reshape(shape), flat),
        hidden=output.hidden,
        taps=output.taps,
        embedding=whole["embed"],
        head=head,
    )


def gather(tree: Any, specs: Any) -> Any:
    """Makes sharded parameters whole; the transpose scatters and sums their gradient."""

    def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if "data" not in spec:
            return x
        return jax.lax.all_gather(x, "data", axis=tuple(spec).index("data"), tiled=True)

    return {name: one(value, specs[name]) for name, value in tree.items()}


def sum_over_data(tree: Any) -> Any:
    """Sums every leaf over the devices of the data axis."""
    return jax.lax.psum(tree, "data")


def reduce_gradients(gradients: Any, specs: Any) -> Any:
    """Sums local gradients once; those of split parameters were summed by their gather."""
    return jax.tree.map(
        lambda g, spec: g if "data" in spec else sum_over_data(g),
        gradients,
        specs,
    )


@flax.struct.dataclass
class Features:
    """What a draft is fitted to, computed once: see `TargetView`."""

    taps: Any
    hidden: Any
    log_normaliser: Any


def make_features(
    model: ModelConfig, draft: Draft, mesh: Mesh, *, compute_dtype: str, chunk: int = 256
) -> Callable[[Any, PackedBatch], Features]:
    """Builds the jitted function (policy params, batch [row, token]) -> features."""
    specs = partition_specs(policy.param_table(model), mesh)

    def run(params: Any, rows: PackedBatch) -> Features:
        scored = score(
            params,
            specs,
            rows,
            model,
            taps=draft.tap_layers,
            compute_dtype=compute_dtype,
            chunk=chunk,
        )
        return Features(
            taps=scored.taps,
            hidden=scored.hidden,
            log_normaliser=scored.logprobs.log_normaliser,
        )

    rows = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(specs, rows), out_specs=rows, check_vma=True)
    )


def zeros_like_shapes(shapes: Any) -> Any:
    """Returns zeros for a loop's carry, which differ between the devices of data."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return compat.vary(zeros, ("data",))
