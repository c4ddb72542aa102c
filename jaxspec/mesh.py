"""The device mesh: four named axes, made and checked in one place."""

import dataclasses
import math

import jax
from jax.sharding import Mesh

from jaxspec import compat

AXES = ("data", "pipe", "context", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes.

    Attributes:
      data: rows are split over it, and so are parameters and optimiser states.
      pipe: pipeline stages.
      context: tokens of a row.
      tensor: heads and vocabulary.
    """

    data: int = 1
    pipe: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"MeshConfig.{axis}={size}; an axis has at least one device")
            if axis != "data" and size != 1:
                raise ValueError(
                    f"MeshConfig.{axis}={size}; this version runs {axis}=1 only. "
                    "Use MeshConfig.data for more devices"
                )


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh over the first devices.

    Raises:
      ValueError: if the axes ask for more devices than there are.
    """
    shape = tuple(getattr(config, axis) for axis in AXES)
    needed, present = math.prod(shape), jax.device_count()
    if needed > present:
        raise ValueError(
            f"the mesh {dict(zip(AXES, shape, strict=True))} needs {needed} devices and there are "
            f"{present}; lower MeshConfig.data (on CPUs, JAX_NUM_CPU_DEVICES adds devices)"
        )
    return compat.make_mesh(shape, AXES, devices=jax.devices()[:needed])
