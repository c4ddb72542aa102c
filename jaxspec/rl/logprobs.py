"""Log-probabilities of chosen tokens from hidden states and the head, a few rows at a time.

No [rows, vocab] array exists: the forward pass keeps one number a row, and the backward pass
computes a chunk's logits again. Rows that the mask leaves out cost nothing, wherever they stand.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import compat


@flax.struct.dataclass
class LogprobOutput:
    """What the head says about each row; exactly 0 in rows that are masked out.

    Attributes:
      logprobs: [rows] log-probability of the label under softmax(logits / temperature), in nats.
      log_normaliser: [rows] logsumexp of the raw logits (temperature 1), without gradient.
      entropy: [rows] entropy of softmax(logits / temperature) in nats, without gradient.
    """

    logprobs: Array
    log_normaliser: Array
    entropy: Array


class _Settings(NamedTuple):
    temperature: float
    dtype: str
    chunk: int

    @property
    def wide(self) -> jnp.dtype:
        return jnp.promote_types(jnp.dtype(self.dtype), jnp.float32)


def token_logprobs(
    hidden: Float[Array, "rows dim"],
    head: Float[Array, "vocab dim"],
    labels: Int[Array, " rows"],
    mask: Bool[Array, " rows"],
    *,
    temperature: float = 1.0,
    compute_dtype: str = "float32",
    chunk: int = 256,
) -> LogprobOutput:
    """Computes the labels' log-probabilities, differentiable in `hidden` and `head`.

    Runs inside jit, scan and shard_map. Under shard_map each device handles the rows it holds; the
    head's gradient is summed over the devices if the head is replicated there, and stays local if
    the head was marked as varying.

    Args:
      hidden: final hidden states; those of masked rows may hold anything, NaN too.
      head: the matrix that turns hidden states into logits.
      labels: the token whose log-probability is wanted; free in masked rows.
      mask: rows to compute.
      temperature: divides the logits; a Python number.
      compute_dtype: dtype of the matrix products' inputs; sums and softmax are at least float32.
      chunk: rows handled at once; the largest temporary is [chunk, vocab].

    Returns:
      Arrays [rows] in float32 (float64 where compute_dtype is).

    Raises:
      ValueError: for a temperature or chunk that is not positive, or widths that differ.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities need a temperature above 0"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} rows; it must be at least 1")
    if hidden.shape[1] != head.shape[1]:
        raise ValueError(
            f"hidden states are {hidden.shape[1]} wide and the head is {head.shape[1]} wide"
        )
    settings = _Settings(
        float(temperature), jnp.dtype(compute_dtype).name, max(1, min(chunk, len(labels)))
    )
    args = (hidden, head, labels, mask)
    hidden, head, labels, mask = compat.vary(args, _axes(args))
    with jax.named_scope("token_logprobs"):
        logprobs, log_normaliser, entropy = _token_logprobs(hidden, head, labels, mask, settings)
    return LogprobOutput(
        logprobs=logprobs,
        log_normaliser=jax.lax.stop_gradient(log_normaliser),
        entropy=jax.lax.stop_gradient(entropy),
    )


def _axes(tree) -> tuple[str, ...]:
    return tuple(sorted(frozenset().union(*map(compat.varying_axes, jax.tree.leaves(tree)))))


def _plan(mask: Bool[Array, " rows"], chunk: int) -> tuple[Array, Array, Array]:
    """Orders the rows so that those in the mask come first.

    Returns:
      The order, padded with an index past the end to whole chunks; the number of rows in the mask;
      the number of chunks that hold any of them.
    """
    rows = mask.shape[0]
    padding = -(-rows // chunk) * chunk - rows
    order = jnp.pad(jnp.argsort(~mask, stable=True), (0, padding), constant_values=rows)
    count = jnp.sum(mask, dtype=jnp.int32)
    return order.astype(jnp.int32), count, (count + chunk - 1) // chunk


def _for_chunks(hidden, labels, mask, settings, body, carry):
    """Folds `body(carry, index, live, hidden, labels)` over the chunks with a masked-in row."""
    if not labels.size:
        return carry
    order, count, chunks = _plan(mask, settings.chunk)
    axes = _axes((hidden, labels, mask))

    def step(i, carry):
        start = i * settings.chunk
        index = jax.lax.dynamic_slice_in_dim(order, start, settings.chunk)
        live = start + jnp.arange(settings.chunk) < count
        h = hidden.at[index].get(mode="fill", fill_value=0)
        h = jnp.where(live[:, None], h, 0).astype(settings.dtype)
        chosen = jnp.where(live, labels.at[index].get(mode="fill", fill_value=0), 0)
        return body(carry, index, live, h, chosen)

    first, order, chunks, carry = compat.vary((jnp.int32(0), order, chunks, carry), axes)
    return jax.lax.fori_loop(first, chunks, step, carry)


def _dot(a: Array, b: Array, contract: tuple[int, int], settings: _Settings) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=settings.wide)


def _log_sum_exp(logits: Array) -> tuple[Array, Array]:
    """Returns logsumexp of each row and the mean logit under the row's softmax."""
    top = jnp.max(logits, axis=1)
    weights = jnp.exp(logits - top[:, None])
    total = compat.row_sum(weights)
    mean = compat.row_sum(weights * logits) / total
    return top + jnp.log(total), mean


def _forward(hidden, head, labels, mask, settings):
    head = head.astype(settings.dtype)

    def body(out, index, live, h, chosen):
        logits = _dot(h, head, (1, 1), settings)
        raw = logits
        if settings.temperature != 1:
            logits = logits / settings.temperature
        normaliser, mean = _log_sum_exp(logits)
        raw_normaliser = normaliser if logits is raw else jax.nn.logsumexp(raw, axis=1)
        at_label = jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
        values = (at_label - normaliser, raw_normaliser, normaliser - mean, normaliser)
        return tuple(
            array.at[index].set(jnp.where(live, value, 0), mode="drop")
            for array, value in zip(out, values, strict=True)
        )

    zeros = (jnp.zeros(labels.shape, settings.wide),) * 4
    return _for_chunks(hidden, labels, mask, settings, body, zeros)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_logprobs(hidden, head, labels, mask, settings):
    return _forward(hidden, head, labels, mask, settings)[:3]


def _token_logprobs_fwd(hidden, head, labels, mask, settings):
    *out, normaliser = _forward(hidden, head, labels, mask, settings)
    return tuple(out), (hidden, head, labels, mask, normaliser)


def _token_logprobs_bwd(settings, residuals, grads):
    hidden, head, labels, mask, normaliser = residuals
    # Gradients of the normaliser and of the entropy stop here.
    grad = grads[0] / settings.temperature
    weight = head.astype(settings.dtype)

    def body(carry, index, live, h, chosen):
        d_hidden, d_head = carry
        logits = _dot(h, weight, (1, 1), settings) / settings.temperature
        z = normaliser.at[index].get(mode="fill", fill_value=0)
        g = jnp.where(live, grad.at[index].get(mode="fill", fill_value=0), 0)
        # One-hot minus softmax is formed before rounding: near certainty the two almost cancel.
        hit = jnp.arange(logits.shape[1], dtype=chosen.dtype) == chosen[:, None]
        d_logits = (hit - jnp.exp(logits - z[:, None])) * g[:, None]
        d_logits = d_logits.astype(settings.dtype)
        d_rows = _dot(d_logits, weight, (1, 0), settings).astype(d_hidden.dtype)
        d_hidden = d_hidden.at[index].set(d_rows, mode="drop")
        return d_hidden, d_head + _dot(d_logits, h, (0, 0), settings)

    zeros = (jnp.zeros_like(hidden), jnp.zeros(head.shape, settings.wide))
    with jax.named_scope("token_logprobs_backward"):
        d_hidden, d_head = _for_chunks(hidden, labels, mask, settings, body, zeros)
    return d_hidden, d_head.astype(head.dtype), None, None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)
