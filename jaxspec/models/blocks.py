"""Leaf computations shared by policies and drafts: norms, rotary positions, projections, MLP.

The residual stream is float32 throughout; matrix products take their inputs in the compute dtype
and accumulate in float32.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.compat import sum_of_products
from jaxspec.models.config import RopeScaling


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*batch dim"], weight: Float[Array, " dim"], eps: float
) -> Float[Array, "*batch dim"]:
    """Root-mean-square norm (arXiv 1910.07467), computed in at least float32."""
    return (_normalise(x, eps)[0] * weight).astype(x.dtype)


def _normalise(x: Array, eps: float) -> tuple[Array, Array]:
    """Returns x over its root mean square, and one over that, both at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(sum_of_products(wide, wide) / x.shape[-1] + eps)[..., None]
    return wide * inverse, inverse


def _rms_norm_fwd(x, weight, eps):
    return rms_norm(x, weight, eps), (x, weight)


def _rms_norm_bwd(eps, residuals, grad):
    # Written out, since its sums over rows and over features run far faster as contractions.
    x, weight = residuals
    normed, inverse = _normalise(x, eps)
    grad = grad.astype(normed.dtype)
    d_normed = grad * weight
    lost = sum_of_products(d_normed, normed)[..., None] / x.shape[-1]
    dx = (d_normed - normed * lost) * inverse
    rows = (y.reshape(-1, x.shape[-1]) for y in (grad, normed))
    d_weight = jnp.einsum("nd,nd->d", *rows, precision=jax.lax.Precision.HIGHEST)
    return dx.astype(x.dtype), d_weight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "inputs outputs"], dtype: str
) -> Float[Array, "*batch outputs"]:
    """Multiplies by a kernel; inputs rounded to `dtype`, sums and result in the wider type.

    Its gradient multiplies in `dtype` too, and returns the weight's gradient unrounded.
    """
    return _product(x, weight, dtype)


def _product(x: Array, weight: Array, dtype: str) -> Array:
    out = jnp.promote_types(jnp.dtype(dtype), jnp.float32)
    return jnp.einsum(
        "...i,io->...o", x.astype(dtype), weight.astype(dtype), preferred_element_type=out
    )


def _linear_fwd(x, weight, dtype):
    return _product(x, weight, dtype), (x, weight)


def _linear_bwd(dtype, residuals, grad):
    x, weight = residuals
    out = jnp.promote_types(jnp.dtype(dtype), jnp.float32)
    g = grad.astype(dtype).reshape(-1, grad.shape[-1])
    flat = x.astype(dtype).reshape(-1, x.shape[-1])
    dx = jnp.einsum("no,io->ni", g, weight.astype(dtype), preferred_element_type=out)
    dw = jnp.einsum("ni,no->io", flat, g, preferred_element_type=out)
    return dx.reshape(x.shape).astype(x.dtype), dw.astype(weight.dtype)


linear.defvjp(_linear_fwd, _linear_bwd)


def decode_linear(
    x: Float[Array, "*batch inputs"], kernel: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    """Multiplies a few rows by a kernel stored [out, in], in the kernel's dtype.

    With the kernel first, the product of up to some 50 rows on a CPU runs 1.3 to 3 times faster
    than `x @ kernel`: the large operand is read in place and only the small one is rearranged.
    """
    out = jnp.promote_types(kernel.dtype, jnp.float32)
    flat = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    y = jnp.einsum("oi,ni->on", kernel, flat, preferred_element_type=out)
    # Without the barrier the compiler would swap the operands to save the transpose.
    y = jax.lax.optimization_barrier(y)
    return y.T.reshape(*x.shape[:-1], -1)


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Returns rotary frequencies and the factor on cos and sin.

    Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv
    2309.00071); the Llama 3.1 release for "llama3". "dynamic" leaves the frequencies as they are
    up to `original_max_position_embeddings`, which the model's length limit enforces.

    Args:
      head_dim: width of a head.
      theta: rotary base.
      scaling: how frequencies are stretched, if at all.

    Returns:
      Frequencies float64 [head_dim / 2] in radians per position, and the attention factor.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    freqs = theta**-exponents
    if scaling is None or scaling.kind == "dynamic":
        return freqs, 1.0
    if scaling.kind == "linear":
        return freqs / scaling.factor, 1.0
    original = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / freqs
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        return (1 - blend) * freqs / scaling.factor + blend * freqs, 1.0

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 1e-3)
    stretched = np.clip(ramp, 0.0, 1.0)
    return stretched * freqs / scaling.factor + (1 - stretched) * freqs, _yarn_factor(scaling)


def _yarn_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def rope_table(
    positions: Int[Array, "*batch"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Returns cos and sin of the rotary angles in float32, whatever the parameters' dtype."""
    freqs, factor = rope_frequencies(head_dim, theta, scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(freqs, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope(
    x: Float[Array, "*batch heads dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
) -> Float[Array, "*batch heads dim"]:
    """Rotates the two halves of every head (the half-split convention)."""
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


Product = Callable[[Array, Array], Array]
"""(x [.., inputs], kernel) -> [.., outputs]: `linear` or `decode_linear` with its dtype bound."""


def gated_mlp(
    x: Float[Array, "*batch dim"], gate: Array, up: Array, down: Array, product: Product
) -> Float[Array, "*batch dim"]:
    """SwiGLU MLP (arXiv 2002.05202)."""
    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


def cached_attention(
    q: Float[Array, "batch time q_heads dim"],
    keys: Float[Array, "batch kv_heads slots dim"],
    values: Float[Array, "batch kv_heads slots dim"],
    last_slot: Int[Array, "batch time"],
) -> Float[Array, "batch time q_heads dim"]:
    """Attention of a few new rows over a cache; row t sees slots 0..last_slot[t].

    Meant for decoding, where `time` is the handful of tokens checked at once.
    """
    batch, time, q_heads, dim = q.shape
    kv_heads, slots = keys.shape[1:3]
    if jax.default_backend() == "cpu":
        # XLA has no batched product of bfloat16 into float32 there.
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        keys, values = keys.astype(wide), values.astype(wide)
    # One batch axis for sequences and heads together: XLA's CPU product is fastest so.
    group = q_heads // kv_heads
    rows = q.reshape(batch, time, kv_heads, group, dim).astype(keys.dtype)
    rows = jnp.swapaxes(rows, 1, 2).reshape(batch * kv_heads, time * group, dim)
    keys, values = (x.reshape(batch * kv_heads, slots, dim) for x in (keys, values))
    scores = jnp.einsum("nqd,nsd->nqs", rows, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(slots) <= last_slot[:, None, :, None, None]
    scores = scores.reshape(batch, kv_heads, time, group, slots) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    weights = weights.reshape(batch * kv_heads, time * group, slots).astype(values.dtype)
    out = jnp.einsum("nqs,nsd->nqd", weights, values, preferred_element_type=jnp.float32)
    out = jnp.swapaxes(out.reshape(batch, kv_heads, time, group, dim), 1, 2)
    return out.reshape(batch, time, q_heads, dim)


def write_cache(
    cache: Float[Array, "batch kv_heads slots dim"],
    new: Float[Array, "batch time kv_heads dim"],
    start: Int[Array, " batch"],
) -> Float[Array, "batch kv_heads slots dim"]:
    """Writes rows at `start[b]..start[b]+time` of each sequence's cache; rows past the end drop."""
    time = new.shape[1]
    index = start[:, None] + jnp.arange(time)
    rows = jnp.arange(cache.shape[0])[:, None]
    # Advanced indices around a slice put [batch, time] first, which is `new`'s own order.
    return cache.at[rows, :, index].set(new.astype(cache.dtype), mode="drop")
