"""The parameter table: one description from which init, shardings and checks are derived.

A table is a nested dict whose leaves are `ParamInfo`. The parameters themselves are a plain dict
of arrays with the same nesting.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Which mesh axis each logical axis is split over. An absent logical axis is replicated.
LOGICAL_TO_MESH = {"embed": "data"}


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One parameter: its shape, logical axes, initialiser and dtype.

    Attributes:
      shape: array shape.
      axes: one logical name per dimension (None = never split).
      init: "normal" (scaled by 1/sqrt(fan_in)), "embedding" (std 0.02), "zeros" or "ones".
      fan_in: inputs summed by one output; used by "normal".
      dtype: storage dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    fan_in: int = 1
    dtype: str = "float32"

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.axes)} logical axes {self.axes} for shape {self.shape}")
        if self.init not in ("normal", "embedding", "zeros", "ones"):
            raise ValueError(f"unknown initialiser {self.init!r}")


Table = Mapping[str, Any]


def _is_info(x: Any) -> bool:
    return isinstance(x, ParamInfo)


def map_table(fn, table: Table) -> Any:
    """Maps `fn(info)` over the leaves of a table."""
    return jax.tree.map(fn, table, is_leaf=_is_info)


def count_params(table: Table) -> int:
    """Returns the number of scalars in a table."""
    return sum(math.prod(i.shape) for i in jax.tree.leaves(table, is_leaf=_is_info))


def _init_one(info: ParamInfo, key: jax.Array) -> jax.Array:
    dtype = jnp.dtype(info.dtype)
    if info.init == "zeros":
        return jnp.zeros(info.shape, dtype)
    if info.init == "ones":
        return jnp.ones(info.shape, dtype)
    std = 0.02 if info.init == "embedding" else info.fan_in**-0.5
    return (jax.random.normal(key, info.shape, jnp.float32) * std).astype(dtype)


def init_params(table: Table, key: jax.Array, mesh: Mesh | None = None) -> Any:
    """Draws fresh parameters; with a mesh every array is born in its own sharding.

    Args:
      table: nested dict of `ParamInfo`.
      key: typed PRNG key; each parameter folds in its own index.
      mesh: mesh to place the parameters on; the default device when None.
    """
    leaves, treedef = jax.tree.flatten(table, is_leaf=_is_info)

    def build(key: jax.Array) -> Any:
        drawn = [_init_one(info, jax.random.fold_in(key, i)) for i, info in enumerate(leaves)]
        return jax.tree.unflatten(treedef, drawn)

    shardings = None if mesh is None else named_shardings(table, mesh)
    return jax.jit(build, out_shardings=shardings)(key)


def partition_spec(info: ParamInfo, mesh: Mesh) -> PartitionSpec:
    """Returns how one parameter is split over the mesh.

    Raises:
      ValueError: if a split dimension is not a multiple of its mesh axis.
    """
    entries: list[str | None] = []
    for size, logical in zip(info.shape, info.axes, strict=True):
        axis = LOGICAL_TO_MESH.get(logical) if logical else None
        if axis is None or axis in entries or mesh.shape.get(axis, 1) == 1:
            entries.append(None)
            continue
        if size % mesh.shape[axis]:
            raise ValueError(
                f"logical axis {logical!r} has {size} entries, which {mesh.shape[axis]} devices of "
                f"mesh axis {axis!r} do not divide; change MeshConfig.{axis}"
            )
        entries.append(axis)
    # Specs that mean the same but differ in trailing Nones would be compiled for twice.
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def partition_specs(table: Table, mesh: Mesh) -> Any:
    """Returns a `PartitionSpec` for every parameter."""
    return map_table(lambda info: partition_spec(info, mesh), table)


def named_shardings(table: Table, mesh: Mesh) -> Any:
    """Returns a `NamedSharding` for every parameter."""
    return map_table(lambda info: NamedSharding(mesh, partition_spec(info, mesh)), table)


def abstract_params(table: Table, mesh: Mesh | None = None) -> Any:
    """Returns shapes and dtypes (and shardings, with a mesh) without making an array."""

    def one(info: ParamInfo) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, partition_spec(info, mesh))
        return jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype), sharding=sharding)

    return map_table(one, table)


def place_params(table: Table, tree: Any, mesh: Mesh | None = None) -> Any:
    """Casts host arrays to the table's dtypes and puts each straight into its own sharding.

    Args:
      table: nested dict of `ParamInfo`.
      tree: arrays with the same nesting and shapes.
      mesh: target mesh; the default device when None.
    """
    check_params(table, tree, "parameters")

    def put(info: ParamInfo, x: Any) -> jax.Array:
        x = np.asarray(x, jnp.dtype(info.dtype)) if not isinstance(x, jax.Array) else x
        x = x.astype(info.dtype)
        if mesh is None:
            return jnp.asarray(x)
        return jax.device_put(x, NamedSharding(mesh, partition_spec(info, mesh)))

    return jax.tree.map(put, table, tree, is_leaf=_is_info)


def check_params(table: Table, tree: Any, name: str) -> None:
    """Checks that `tree` holds exactly the arrays that the table describes.

    Args:
      table: nested dict of `ParamInfo`.
      tree: nested dict of arrays (or anything with `.shape`).
      name: what the tree is, for the message.

    Raises:
      ValueError: naming every missing, unexpected and wrongly shaped parameter.
    """
    want = _flat(table)
    have = _flat(tree)
    problems = [f"missing {k}" for k in want if k not in have]
    problems += [f"unexpected {k}" for k in have if k not in want]
    problems += [
        f"{k} has shape {tuple(have[k].shape)}, expected {want[k].shape}"
        for k in want
        if k in have and tuple(have[k].shape) != want[k].shape
    ]
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def _flat(tree: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_info)[0]
    return {".".join(str(k.key) for k in path): leaf for path, leaf in paths}
