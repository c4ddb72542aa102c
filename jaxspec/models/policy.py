"""The policy: one pure forward for training and prefill, and one step over a cache for decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxspec.models import blocks
from jaxspec.models.config import ModelConfig
from jaxspec.params import ParamInfo, Table

Attend = Callable[[Array, Array, Array], Array]
REMAT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "products": ("product", "attention_out", "attention_lse"),
    "layer": (),
}
"""How much of a layer the backward pass computes again, by name, and the values it stores then:
nothing; what lies between matrix products and attention (norms, activations, rotations), which is
cheaper than storing it; the whole layer."""
Params = dict[str, Any]


@flax.struct.dataclass
class PolicyOutput:
    """What a forward pass leaves behind.

    Attributes:
      hidden: [batch, time, dim] after the final norm; the head turns it into logits.
      taps: [batch, time, taps * dim] outputs of the tapped layers before the final norm, in
        ascending layer order, behind stop_gradient; None when nothing is tapped.
      keys: [layers, batch, time, kv_heads, head_dim] when asked for, else None.
      values: as keys.
    """

    hidden: Array
    taps: Array | None = None
    keys: Array | None = None
    values: Array | None = None


def param_table(config: ModelConfig) -> Table:
    """Describes every parameter of a policy; kernels are [in, out], stacked over layers."""
    dim, ffn, layers, vocab = (
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.vocab_size,
    )
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def kernel(inputs: int, outputs: int, axes: tuple[str | None, str | None]) -> ParamInfo:
        return ParamInfo((layers, inputs, outputs), ("layers", *axes), "normal", inputs)

    def vector(size: int, init: str = "ones") -> ParamInfo:
        return ParamInfo((layers, size), ("layers", None), init)

    layer = {
        "attn_norm": vector(dim),
        "q": kernel(dim, q_width, ("embed", "heads")),
        "k": kernel(dim, kv_width, ("embed", "heads")),
        "v": kernel(dim, kv_width, ("embed", "heads")),
        "o": kernel(q_width, dim, ("heads", "embed")),
        "mlp_norm": vector(dim),
        "gate": kernel(dim, ffn, ("embed", "ffn")),
        "up": kernel(dim, ffn, ("embed", "ffn")),
        "down": kernel(ffn, dim, ("ffn", "embed")),
    }
    if config.qkv_bias:
        layer["q_bias"] = vector(q_width, "zeros")
        layer["k_bias"] = vector(kv_width, "zeros")
        layer["v_bias"] = vector(kv_width, "zeros")
    if config.qk_norm:
        layer["q_norm"] = vector(config.head_dim)
        layer["k_norm"] = vector(config.head_dim)
    table: dict[str, Any] = {
        "embed": ParamInfo((vocab, dim), ("vocab", "embed"), "embedding"),
        "layers": layer,
        "final_norm": ParamInfo((dim,), (None,), "ones"),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = ParamInfo((vocab, dim), ("vocab", "embed"), "normal", dim)
    return table


def head(params: Params) -> Float[Array, "vocab dim"]:
    """Returns the matrix that turns hidden states into logits (the embedding when tied)."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def queries_keys_values(
    layer: Params,
    x: Float[Array, "*batch dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
    config: ModelConfig,
    product: blocks.Product,
) -> tuple[Array, Array, Array]:
    """Projects a layer's input to rotated queries and keys and to values, each [.., heads, dim]."""
    h = blocks.rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    q, k, v = (product(h, layer[name]) for name in ("q", "k", "v"))
    if config.qkv_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    q, k, v = (y.reshape(*y.shape[:-1], -1, config.head_dim) for y in (q, k, v))
    if config.qk_norm:
        q = blocks.rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = blocks.rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    return blocks.rope(q, cos, sin), blocks.rope(k, cos, sin), v


def finish_layer(
    layer: Params,
    x: Float[Array, "*batch dim"],
    attended: Array,
    config: ModelConfig,
    product: blocks.Product,
) -> Float[Array, "*batch dim"]:
    """Adds the attention output and the MLP to the residual stream."""
    x = x + product(attended.reshape(*x.shape[:-1], -1), layer["o"])
    h = blocks.rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    return x + blocks.gated_mlp(h, layer["gate"], layer["up"], layer["down"], product)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "batch time"],
    positions: Int[Array, "batch time"],
    attend: Attend,
    *,
    taps: Sequence[int] = (),
    compute_dtype: str = "float32",
    remat: str = "none",
    keep_cache: bool = False,
    gather: Callable[[Params], Params] | None = None,
) -> PolicyOutput:
    """Runs the policy over whole rows.

    Args:
      params: the policy's parameters, stacked over layers.
      config: the policy's shape.
      tokens: token ids.
      positions: positions in the document, for RoPE.
      attend: (q, k, v) each [batch, time, heads, head_dim] -> [batch, time, q_heads, head_dim].
      taps: 0-based layers whose output is returned, ascending.
      compute_dtype: dtype of the matrix products' inputs.
      remat: one of `REMAT`.
      keep_cache: also return every layer's keys and values.
      gather: makes one layer's parameters whole where they are sharded; the parameters outside the
        layers come whole.

    Raises:
      ValueError: for taps that are not ascending or lie outside the layers, or an unknown `remat`.
    """
    check_taps(taps, config.num_layers)
    check_remat(remat)
    whole = gather if gather is not None else lambda tree: tree
    cos, sin = blocks.rope_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = params["embed"][tokens]
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    tap_ids = jnp.asarray(taps, jnp.int32)

    def product(x, kernel):
        return checkpoint_name(blocks.linear(x, kernel, compute_dtype), "product")

    def layer_step(carry, xs):
        x, tapped = carry
        index, layer = xs
        layer = whole(layer)
        q, k, v = queries_keys_values(layer, x, cos, sin, config, product)
        q, k, v = q.astype(compute_dtype), k.astype(compute_dtype), v.astype(compute_dtype)
        with jax.named_scope("attention"):
            attended = attend(q, k, v)
        x = finish_layer(layer, x, attended.astype(x.dtype), config, product)
        if taps:
            hit = (tap_ids == index)[:, None, None, None]
            tapped = jnp.where(hit, jax.lax.stop_gradient(x)[None], tapped)
        return (x, tapped), ((k, v) if keep_cache else None)

    step = _rematerialised(layer_step, remat)
    tapped = jnp.stack([jnp.zeros_like(x)] * len(taps)) if taps else None
    with jax.named_scope("policy_layers"):
        (x, tapped), cache = jax.lax.scan(
            step, (x, tapped), (jnp.arange(config.num_layers), params["layers"])
        )
    hidden = blocks.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    if taps:
        tapped = jnp.moveaxis(tapped, 0, 2).reshape(*x.shape[:2], -1)
    keys, values = cache if keep_cache else (None, None)
    return PolicyOutput(hidden=hidden, taps=tapped, keys=keys, values=values)


def _rematerialised(layer_step: Callable, remat: str) -> Callable:
    kept = REMAT[remat]
    if kept is None:
        return layer_step
    # Inside a scan nothing can be merged with the first computation: no barrier is needed.
    return jax.checkpoint(
        layer_step,
        policy=jax.checkpoint_policies.save_only_these_names(*kept),
        prevent_cse=False,
    )


def check_remat(remat: str) -> None:
    """Checks that `remat` is one of `REMAT`.

    Raises:
      ValueError: naming the kinds there are.
    """
    if remat not in REMAT:
        raise ValueError(f"remat={remat!r} is none of {tuple(REMAT)} (StepConfig.remat)")


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Checks that tapped layers are ascending, unique, and not the last layer or beyond.

    Raises:
      ValueError: naming the taps and the number of layers.
    """
    if list(taps) != sorted(set(taps)) or any(not 0 <= t < num_layers for t in taps):
        raise ValueError(
            f"tap_layers {tuple(taps)} must be ascending and unique in 0..{num_layers - 1} "
            f"for a policy of {num_layers} layers"
        )


@flax.struct.dataclass
class DecodeParams:
    """A policy laid out for decoding.

    Attributes:
      params: the parameters as they are trained; prefill, embedding and head read them.
      layers: from `decode_layers`, for the unrolled decoding step.
    """

    params: Any
    layers: Any


def decode_layers(layers: Params, num_layers: int, compute_dtype: str) -> list[Params]:
    """Lays stacked layers out for `decode`; costs one copy of every weight.

    Returns:
      One dict a layer, kernels [out, in] in the compute dtype (see `blocks.decode_linear`).
    """

    def one(value: Array, i: int) -> Array:
        return value[i].T.astype(compute_dtype) if value.ndim == 3 else value[i]

    return [{name: one(value, i) for name, value in layers.items()} for i in range(num_layers)]


def decode(
    prepared: DecodeParams,
    config: ModelConfig,
    tokens: Int[Array, "batch time"],
    start: Int[Array, " batch"],
    cache: tuple[tuple[Array, Array], ...],
    *,
    taps: Sequence[int] = (),
) -> tuple[PolicyOutput, tuple[tuple[Array, Array], ...]]:
    """Appends a few tokens to every sequence's cache and runs the policy on them.

    Args:
      prepared: the policy; the layers' dtype is that of the matrix products.
      config: the policy's shape.
      tokens: ids at positions start..start+time-1 of each sequence.
      start: [batch] slots already filled, which is also the first new position.
      cache: per layer (keys, values), each [batch, kv_heads, slots, head_dim].
      taps: 0-based layers whose output is returned.

    Returns:
      The output for the new rows and the cache with them written. Undoing rows needs nothing but a
      smaller `start` on the next call.
    """
    batch, time = tokens.shape
    positions = start[:, None] + jnp.arange(time)
    cos, sin = blocks.rope_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = prepared.params["embed"][tokens].astype(jnp.float32)
    tapped, new_cache = [], []
    for index, (layer, (keys, values)) in enumerate(zip(prepared.layers, cache, strict=True)):
        q, k, v = queries_keys_values(layer, x, cos, sin, config, blocks.decode_linear)
        keys = blocks.write_cache(keys, k, start)
        values = blocks.write_cache(values, v, start)
        attended = blocks.cached_attention(q, keys, values, positions)
        x = finish_layer(layer, x, attended, config, blocks.decode_linear)
        new_cache.append((keys, values))
        if index in taps:
            tapped.append(x)
    hidden = blocks.rms_norm(x, prepared.params["final_norm"], config.rms_norm_eps)
    joined = jnp.concatenate(tapped, axis=-1) if tapped else None
    return PolicyOutput(hidden=hidden, taps=joined), tuple(new_cache)
