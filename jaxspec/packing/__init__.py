"""From sampled documents to rows of tokens with their masks, intervals and look-ahead ids."""

from jaxspec.packing.batch import (
    PackedBatch,
    PackingConfig,
    PackStats,
    Sample,
    split_microbatches,
)
from jaxspec.packing.pack import pack

__all__ = [
    "PackStats",
    "PackedBatch",
    "PackingConfig",
    "Sample",
    "pack",
    "split_microbatches",
]
