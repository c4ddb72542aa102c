"""The only version-aware code: forms that mean the same on every supported JAX."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float


def make_mesh(
    shape: Sequence[int], names: Sequence[str], devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Builds a mesh with Auto axes (the library's default would be Explicit ones).

    Args:
      shape: size of each axis.
      names: name of each axis.
      devices: devices to use, in order; all local ones when None.
    """
    axis_types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(tuple(shape), tuple(names), axis_types=axis_types, devices=devices)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the manual mesh axes over which `x` may differ between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(tree: Any, axes: Collection[str]) -> Any:
    """Marks every leaf as differing over `axes`; leaves that already do are unchanged.

    The transpose of this mark is a sum over `axes`, so a gradient taken with respect to a marked
    value stays local until it is reduced explicitly.
    """

    def one(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def sum_of_products(
    a: Float[Array, "*batch dim"], b: Float[Array, "*batch dim"]
) -> Float[Array, "*batch"]:
    """Sums a * b over the last dimension.

    On CPUs XLA 0.10 gives a plain sum to a library that takes some ten times as long as the loop
    it makes for a contraction.
    """
    if jax.default_backend() != "cpu":
        return jnp.sum(a * b, axis=-1)
    return jnp.einsum("...d,...d->...", a, b, precision=jax.lax.Precision.HIGHEST)


def row_sum(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
    """Sums over the last dimension; see `sum_of_products`."""
    if jax.default_backend() != "cpu":
        return jnp.sum(x, axis=-1)
    ones = jnp.ones(x.shape[-1], x.dtype)
    return jnp.einsum("...d,d->...", x, ones, precision=jax.lax.Precision.HIGHEST)
