"""From replies to what an update takes: packed microbatches of one static shape."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.packing import PackedBatch, PackingConfig, PackStats, Sample, pack, split_microbatches


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """One update's batch.

    Attributes:
      batch: PackedBatch [microbatch, row, token] on the mesh, rows split over data.
      used: microbatches that hold a document; the rest is padding that is never computed.
      stats: what packing cost.
    """

    batch: PackedBatch
    used: int
    stats: PackStats


def build_microbatches(
    samples: Sequence[Sample], packing: PackingConfig, *, num_ahead: int, capacity: int, mesh: Mesh
) -> Microbatches:
    """Packs samples into microbatches whose number does not depend on how they pack.

    Args:
      samples: replies with their advantages.
      packing: row length and microbatch size.
      num_ahead: tokens looked ahead.
      capacity: most samples an update can have; every sample takes at most one row, so the shape
        derived from it always fits and one program serves every step.
      mesh: rows are split over its data axis.
    """
    each = packing.rows_per_microbatch
    rows, stats = pack(
        samples,
        row_length=packing.row_length,
        num_ahead=num_ahead,
        share_prompts=packing.share_prompts,
        packed=packing.packed,
        rows_multiple=each,
    )
    count = rows.tokens.shape[0] // each
    missing = max(0, -(-capacity // each) - count)
    padded = jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing * each, *x.shape[1:]), x.dtype)]), rows
    )
    batch = split_microbatches(padded, each)
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    placed = jax.tree.map(lambda x: jax.device_put(x, sharding), batch)
    return Microbatches(batch=placed, used=count if samples else 0, stats=stats)


def place_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays [row, ...] on the mesh with their rows split over data."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


def reply_samples(
    prompts: Sequence[np.ndarray], result: Any, samples_per_prompt: int, **fields: np.ndarray
) -> list[Sample]:
    """Turns rollout results into samples; `fields` gives per-reply advantages and weights."""
    samples = []
    for i in range(len(result.lengths)):
        n = int(result.lengths[i])
        group = i // samples_per_prompt
        samples.append(
            Sample(
                prompt=prompts[group],
                reply=result.tokens[i, :n],
                logprobs=result.logprobs[i, :n],
                group=group,
                **{"advantage": 0.0} | {name: float(value[i]) for name, value in fields.items()},
            )
        )
    return samples
