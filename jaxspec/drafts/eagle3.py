"""EAGLE-3: one decoder layer over tapped policy features that drafts a chain of tokens.

Scaling up Inference Acceleration via Training-Time Test (arXiv 2503.01840). Row i pairs the taps
at position i with the embedding of x_{i+1} and predicts x_{i+2}. Pass (or draft step) d of row i
embeds x_{i+d} at rotary position i+d-1, takes the previous pass's output in place of the taps,
and predicts x_{i+d+1}. It sees the trunk, which is pass 1 of the rows up to i, and its own keys
of passes 2..d: just what the cache holds at the d-th step of drafting after row i.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import compat
from jaxspec.attention import blockwise
from jaxspec.drafts import losses
from jaxspec.drafts.base import (
    DistillOutput,
    DraftState,
    DraftWeights,
    Draw,
    Metrics,
    Proposal,
    TargetView,
)
from jaxspec.drafts.eagle3_config import Eagle3Config, default_taps
from jaxspec.models import blocks, policy
from jaxspec.packing import PackedBatch
from jaxspec.params import ParamInfo, Table, init_params, partition_spec

__all__ = ["Eagle3", "Eagle3Config", "default_taps"]

# Factor on the initial kernels that write into the residual stream: a fresh draft's layer then
# hardly changes it, and the head reads the fused taps.
RESIDUAL_SCALE = 0.3
# What the fused feature keeps of the last tap at the start.
LAST_TAP_SCALE = 0.9


@dataclasses.dataclass(frozen=True)
class Eagle3:
    """The draft as pure functions of its weights; see `jaxspec.drafts.base.Draft`."""

    config: Eagle3Config

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based policy layers whose output is tapped, ascending."""
        return self.config.tap_layers

    @property
    def num_ahead(self) -> int:
        """Tokens that packing must look ahead: pass K embeds x_{i+K} and predicts the next."""
        return self.config.num_passes + 1

    @property
    def pass_weights(self) -> tuple[float, ...]:
        """Weight of each pass in the loss."""
        return self.config.pass_weights or (1.0,) * self.config.num_passes

    @property
    def reduced(self) -> bool:
        """Whether the draft speaks a part of the target's vocabulary only."""
        return self.config.draft_vocab_size < self.config.vocab_size

    def param_table(self) -> Table:
        """Describes the trained parameters; kernels are [in, out]."""
        c = self.config
        dim, ffn, features = c.hidden_size, c.intermediate_size, len(c.tap_layers) * c.hidden_size
        q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def kernel(inputs: int, outputs: int, axes: tuple[str, str]) -> ParamInfo:
            return ParamInfo((inputs, outputs), axes, "normal", inputs)

        def vector(size: int) -> ParamInfo:
            return ParamInfo((size,), (None,), "ones")

        table = {
            "fc": kernel(features, dim, ("taps", "embed")),
            "input_norm": vector(dim),
            "hidden_norm": vector(dim),
            "q": kernel(2 * dim, q_width, ("embed", "heads")),
            "k": kernel(2 * dim, kv_width, ("embed", "heads")),
            "v": kernel(2 * dim, kv_width, ("embed", "heads")),
            "o": kernel(q_width, dim, ("heads", "embed")),
            "mlp_norm": vector(dim),
            "gate": kernel(dim, ffn, ("embed", "ffn")),
            "up": kernel(dim, ffn, ("embed", "ffn")),
            "down": kernel(ffn, dim, ("ffn", "embed")),
            "norm": vector(dim),
            "lm_head": ParamInfo((c.draft_vocab_size, dim), ("vocab", "embed"), "normal", dim),
        }
        if c.norm_before_fc:
            table["taps_norm"] = vector(features)
        return table

    def buffer_table(self) -> Table:
        """Describes the constants."""
        if not self.reduced:
            return {}
        size = self.config.draft_vocab_size
        return {"vocab_ids": ParamInfo((size,), (None,), "zeros", dtype="int32")}

    def init(
        self,
        key: Key[Array, ""],
        policy_params: Any,
        vocab_ids: Int[np.ndarray, " draft_vocab"] | None = None,
        mesh: Mesh | None = None,
    ) -> DraftWeights:
        """Draws fresh weights near to what the policy itself would say.

        The head starts as the policy's rows of the draft's vocabulary, and the fused feature as the
        last tap with a little of the others.

        Args:
          key: typed PRNG key.
          policy_params: the policy's parameters.
          vocab_ids: ascending target ids of the draft's vocabulary, or None for the whole one.
          mesh: mesh to place the weights on; the default device when None.

        Raises:
          ValueError: the ids do not fit draft_vocab_size and vocab_size.
        """
        ids = self._check_vocabulary(vocab_ids)
        table = dict(self.param_table())
        head_info = table.pop("lm_head")
        params = init_params(table, key, mesh)
        for name in ("o", "down", "fc"):
            params[name] = params[name] * RESIDUAL_SCALE
        through = jnp.eye(self.config.hidden_size) * LAST_TAP_SCALE
        params["fc"] = params["fc"].at[-self.config.hidden_size :].add(through)
        sharding = None if mesh is None else NamedSharding(mesh, partition_spec(head_info, mesh))

        def head_rows(head: Array) -> Array:
            rows = head if ids is None else head[ids]
            return rows.astype(jnp.float32)

        params["lm_head"] = jax.jit(head_rows, out_shardings=sharding)(policy.head(policy_params))
        buffers = {} if ids is None else {"vocab_ids": jnp.asarray(ids)}
        return DraftWeights(params=params, buffers=buffers)

    def _check_vocabulary(self, vocab_ids: np.ndarray | None) -> np.ndarray | None:
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        if vocab_ids is None:
            if self.reduced:
                raise ValueError(
                    f"Eagle3Config.draft_vocab_size={size} is less than vocab_size={vocab}; give "
                    "vocab_ids or raise draft_vocab_size"
                )
            return None
        ids = np.asarray(vocab_ids, np.int32)
        if len(ids) != size:
            raise ValueError(
                f"vocab_ids holds {len(ids)} ids for Eagle3Config.draft_vocab_size={size}"
            )
        if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab:
            raise ValueError(
                f"vocab_ids runs from {ids[0]} to {ids[-1]}; ids must be ascending, unique and "
                f"below vocab_size={vocab}"
            )
        return ids if self.reduced else None

    def fuse(
        self, params: Any, taps: Float[Array, "*batch features"], dtype: str
    ) -> Float[Array, "*batch dim"]:
        """Fuses the concatenated taps into the feature that the first pass reads."""
        if self.config.norm_before_fc:
            taps = blocks.rms_norm(taps, params["taps_norm"], self.config.rms_norm_eps)
        return blocks.linear(taps, params["fc"], dtype)

    def project(
        self,
        params: Any,
        embedded: Float[Array, "batch time dim"],
        feature: Float[Array, "batch time dim"],
        positions: Int[Array, "batch time"],
        names: str,
        dtype: str,
    ) -> list[Array]:
        """Projects embedding and feature to "q", "k" or "v", each [batch, time, heads, head_dim].

        The embedding comes first in the doubled input; q and k are rotated to `positions`.
        """
        c = self.config
        joined = jnp.concatenate(
            [
                blocks.rms_norm(embedded, params["input_norm"], c.rms_norm_eps),
                blocks.rms_norm(feature, params["hidden_norm"], c.rms_norm_eps),
            ],
            axis=-1,
        )
        cos, sin = blocks.rope_table(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        out = []
        for name in names:
            y = blocks.linear(joined, params[name], dtype)
            y = y.reshape(*y.shape[:-1], -1, c.head_dim)
            out.append((y if name == "v" else blocks.rope(y, cos, sin)).astype(dtype))
        return out

    def finish(
        self,
        params: Any,
        feature: Float[Array, "batch time dim"],
        attended: Float[Array, "batch time heads head_dim"],
        dtype: str,
    ) -> Float[Array, "batch time dim"]:
        """Adds attention and MLP to the residual; the result is fed back, before the last norm."""
        c = self.config
        residual = feature
        if c.norm_before_residual:
            residual = blocks.rms_norm(feature, params["hidden_norm"], c.rms_norm_eps)
        flat = attended.reshape(*attended.shape[:-2], -1).astype(residual.dtype)
        y = residual + blocks.linear(flat, params["o"], dtype)
        h = blocks.rms_norm(y, params["mlp_norm"], c.rms_norm_eps)

        def product(x: Array, kernel: Array) -> Array:
            return blocks.linear(x, kernel, dtype)

        return y + blocks.gated_mlp(h, params["gate"], params["up"], params["down"], product)

    def logits(
        self, params: Any, hidden: Float[Array, "*batch dim"], dtype: str
    ) -> Float[Array, "*batch draft_vocab"]:
        """Returns the logits over the draft's vocabulary."""
        normed = blocks.rms_norm(hidden, params["norm"], self.config.rms_norm_eps)
        return blocks.linear(normed, params["lm_head"].T, dtype)

    def new_state(self, batch: int, slots: int, dtype: str) -> DraftState:
        """Returns the state of `batch` sequences of which nothing is committed."""
        c = self.config
        cache = jnp.zeros((batch, c.num_kv_heads, slots, c.head_dim), dtype)
        hidden = jnp.zeros((batch, c.hidden_size), jnp.promote_types(dtype, jnp.float32))
        return DraftState(keys=cache, values=jnp.zeros_like(cache), hidden=hidden)

    def commit(
        self,
        weights: DraftWeights,
        embedding: Float[Array, "vocab dim"],
        state: DraftState,
        next_tokens: Int[Array, "batch rows"],
        taps: Float[Array, "batch rows features"],
        start: Int[Array, " batch"],
        count: Int[Array, " batch"],
        *,
        compute_dtype: str = "float32",
    ) -> DraftState:
        """Appends rows start..start+count-1 with the policy's own taps.

        Keys and values depend on a row's inputs alone, so only the last row goes through attention
        and MLP: its output is all that proposing needs.

        Args:
          weights: the draft's weights.
          embedding: the policy's embedding.
          state: state in which rows 0..start-1 are committed.
          next_tokens: x_{i+1} for each row i = start, start+1, ...
          taps: the policy's taps at those rows.
          start: rows committed already.
          count: rows of `next_tokens` and `taps` that are real; 0 leaves the state as it was. Rows
            beyond leave garbage in their slots, which later commits overwrite.
          compute_dtype: dtype of the matrix products' inputs.
        """
        params = weights.params
        rows = next_tokens.shape[1]
        with jax.named_scope("draft_commit"):
            positions = start[:, None] + jnp.arange(rows, dtype=start.dtype)
            embedded = _widen(embedding[next_tokens])
            feature = self.fuse(params, _widen(taps), compute_dtype)
            k, v = self.project(params, embedded, feature, positions, "kv", compute_dtype)
            keys = blocks.write_cache(state.keys, k, start)
            values = blocks.write_cache(state.values, v, start)
            last = jnp.maximum(count - 1, 0)[:, None]
            embedded, feature = (
                jnp.take_along_axis(x, last[..., None], axis=1) for x in (embedded, feature)
            )
            where = jnp.take_along_axis(positions, last, axis=1)
            hidden = self._attend_cache(
                params, embedded, feature, where, keys, values, compute_dtype
            )
            hidden = jnp.where(count[:, None] > 0, hidden, state.hidden)
        return DraftState(keys=keys, values=values, hidden=hidden)

    def _attend_cache(self, params, embedded, feature, positions, keys, values, dtype) -> Array:
        """Runs one row, whose key is in the cache already, and returns its output [batch, dim]."""
        (q,) = self.project(params, embedded, feature, positions, "q", dtype)
        attended = blocks.cached_attention(q, keys, values, positions)
        return self.finish(params, feature, attended, dtype)[:, 0]

    def step(
        self,
        weights: DraftWeights,
        embedding: Float[Array, "vocab dim"],
        state: DraftState,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
        *,
        compute_dtype: str = "float32",
    ) -> DraftState:
        """Appends one row made of the draft's own output and a drafted token.

        Args:
          weights: the draft's weights.
          embedding: the policy's embedding.
          state: its `hidden` is the output of the row before.
          tokens: target ids drafted there.
          positions: slot and rotary position of the new row, one past the row before.
          compute_dtype: dtype of the matrix products' inputs.
        """
        params, where = weights.params, positions[:, None]
        embedded, feature = _widen(embedding[tokens])[:, None], state.hidden[:, None]
        k, v = self.project(params, embedded, feature, where, "kv", compute_dtype)
        keys = blocks.write_cache(state.keys, k, positions)
        values = blocks.write_cache(state.values, v, positions)
        hidden = self._attend_cache(params, embedded, feature, where, keys, values, compute_dtype)
        return DraftState(keys=keys, values=values, hidden=hidden)

    def propose(
        self,
        weights: DraftWeights,
        embedding: Float[Array, "vocab dim"],
        state: DraftState,
        length: Int[Array, " batch"],
        k: int,
        temperature: float,
        draw: Draw | None,
        *,
        compute_dtype: str = "float32",
    ) -> Proposal:
        """Proposes k tokens after the committed rows.

        Args:
          weights: the draft's weights.
          embedding: the policy's embedding.
          state: state with at least one row committed.
          length: rows committed, n; the first token proposed is x_{n+1}.
          k: tokens to propose.
          temperature: divides the logits; 0 proposes arg-maxes.
          draw: called as draw(log_probs f32[batch, draft_vocab], j) for the j-th token (from 0),
            returns an index into the draft's vocabulary for each sequence. Its random numbers must
            serve nothing else. Not called at temperature 0.
          compute_dtype: dtype of the matrix products' inputs.

        Returns:
          Target ids, the distributions they were drawn from, and the state to commit to.

        Raises:
          ValueError: k is below 1, or temperature is negative, or it is positive without `draw`.
        """
        if k < 1:
            raise ValueError(f"k is {k}; a draft proposes at least 1 token")
        if temperature < 0 or (temperature > 0 and draw is None):
            raise ValueError(
                f"temperature is {temperature}; it must not be negative, and needs `draw` above 0"
            )
        tokens, probs = [], []
        running = state
        for j in range(k):
            with jax.named_scope("draft_propose"):
                if j:
                    running = self.step(
                        weights,
                        embedding,
                        running,
                        tokens[-1],
                        length + (j - 1),
                        compute_dtype=compute_dtype,
                    )
                logits = self.logits(weights.params, running.hidden, compute_dtype)
                if temperature == 0:
                    index = jnp.argmax(logits, axis=-1)
                else:
                    log_probs = jax.nn.log_softmax(logits / temperature, axis=-1)
                    probs.append(jnp.exp(log_probs))
                    index = draw(log_probs, j)
                index = index.astype(jnp.int32)
                tokens.append(weights.buffers["vocab_ids"][index] if self.reduced else index)
        return Proposal(
            tokens=jnp.stack(tokens, axis=1),
            probs=jnp.stack(probs, axis=1) if probs else None,
            state=running.replace(hidden=state.hidden),
        )

    def distill_denominator(self, batch: PackedBatch) -> Float[Array, ""]:
        """Returns the sum over passes of weight times trained rows, over the rows given."""
        self._check_ahead(batch)
        per_pass = batch.ahead_mask[..., 1 : self.num_ahead].astype(jnp.float32)
        return jnp.sum(per_pass * jnp.asarray(self.pass_weights, jnp.float32))

    def _check_ahead(self, batch: PackedBatch) -> None:
        if batch.ahead_mask.shape[-1] < self.num_ahead:
            raise ValueError(
                f"the batch looks {batch.ahead_mask.shape[-1]} tokens ahead and "
                f"Eagle3Config.num_passes={self.config.num_passes} needs {self.num_ahead}; pack "
                "with num_ahead=draft.num_ahead"
            )

    def passes(
        self,
        params: Any,
        view: TargetView,
        batch: PackedBatch,
        *,
        compute_dtype: str = "float32",
    ) -> list[Float[Array, "row token dim"]]:
        """Runs the training-time test and returns each pass's output before the last norm.

        Every row is an anchor at once. The trunk is not shifted: a row sees the same rows in every
        pass, although the rotary position of its query moves on with the pass.
        """
        feature = self.fuse(params, _widen(view.taps), compute_dtype)
        outputs, branch_k, branch_v = [], [], []
        for d in range(1, self.config.num_passes + 1):
            with jax.named_scope("draft_pass"):
                embedded = _widen(view.embedding[batch.ahead_tokens[..., d - 1]])
                q, k, v = self.project(
                    params, embedded, feature, batch.positions + (d - 1), "qkv", compute_dtype
                )
                if d == 1:
                    trunk_k, trunk_v, branch = k, v, {}
                else:
                    branch_k.append(k)
                    branch_v.append(v)
                    branch = {
                        "branch_k": jnp.stack(branch_k, axis=2),
                        "branch_v": jnp.stack(branch_v, axis=2),
                    }
                attended, _ = blockwise.attend(q, trunk_k, trunk_v, batch.intervals, **branch)
                feature = self.finish(params, feature, attended, compute_dtype)
                outputs.append(feature)
        return outputs

    def distill(
        self,
        params: Any,
        buffers: Any,
        view: TargetView,
        batch: PackedBatch,
        *,
        compute_dtype: str = "float32",
    ) -> DistillOutput:
        """Returns the loss of the draft against the policy on a packed batch.

        Args:
          params: the draft's parameters, whole.
          buffers: the draft's constants.
          view: what the draft may see of the policy, on the same rows.
          batch: packed rows that look at least num_passes + 1 tokens ahead.
          compute_dtype: dtype of the matrix products' inputs.

        Returns:
          The numerator, whose denominator is `distill_denominator` of the whole global batch, and
          metrics as local (numerator, denominator) sums: draft_loss; and for each pass d from 1
          draft_loss_pass_d, accept_pass_d (sum over v of min(p_v, q_v) on the data) and
          top1_pass_d (equal arg-maxes within the draft's vocabulary); expected_acceptance_length
          (1 + a_1 + a_1 a_2 + ..., over the rows that drafting starts from, a missing pass being
          0); vocabulary_coverage (share of trained tokens that the draft can say).

        Raises:
          ValueError: the batch does not look far enough ahead.
        """
        self._check_ahead(batch)
        view = jax.lax.stop_gradient(view)
        # A kernel must vary over the mesh axes of what it multiplies; the transpose of the mark
        # sums the gradients of those that the caller holds replicated.
        local = jax.tree.leaves((view, batch))
        axes = frozenset().union(*map(compat.varying_axes, local))
        params = compat.vary(params, sorted(axes))
        outputs = self.passes(params, view, batch, compute_dtype=compute_dtype)
        ids = buffers["vocab_ids"] if self.reduced else None
        masks = [batch.ahead_mask[..., d] for d in range(1, self.num_ahead)]
        with jax.named_scope("draft_loss"):
            students = [
                _to_teacher_row(blocks.rms_norm(g, params["norm"], self.config.rms_norm_eps), d)
                for d, g in enumerate(outputs, 1)
            ]
            weights = [
                _to_teacher_row(mask.astype(jnp.float32) * weight, d)
                for d, (mask, weight) in enumerate(zip(masks, self.pass_weights, strict=True), 1)
            ]
            normaliser = view.log_normaliser
            numerator, rows = losses.distill_rows(
                jnp.stack(students).reshape(len(students), -1, self.config.hidden_size),
                params["lm_head"],
                view.hidden.reshape(-1, self.config.hidden_size),
                view.head if ids is None else view.head[ids],
                None if normaliser is None else normaliser.reshape(-1),
                jnp.stack(weights).reshape(len(weights), -1),
                objective=self.config.objective,
                compute_dtype=compute_dtype,
                chunk=self.config.loss_chunk,
            )
        shape = (len(masks), *batch.tokens.shape)
        rows = jax.tree.map(lambda x: list(x.reshape(shape)), rows)
        metrics = self._metrics(numerator, rows, masks, batch, ids)
        return DistillOutput(numerator=numerator, metrics=jax.lax.stop_gradient(metrics))

    def _metrics(
        self,
        numerator: Array,
        rows: losses.RowStats,
        masks: list[Bool[Array, "row token"]],
        batch: PackedBatch,
        ids: Array | None,
    ) -> Metrics:
        metrics = {"draft_loss": (numerator, self.distill_denominator(batch))}
        reach = jnp.ones(batch.tokens.shape, jnp.float32)
        length = reach
        for d, mask in enumerate(masks, 1):
            count = jnp.sum(mask.astype(jnp.float32))
            for name, values in (
                ("draft_loss", rows.loss),
                ("accept", rows.acceptance),
                ("top1", rows.top1),
            ):
                metrics[f"{name}_pass_{d}"] = (jnp.sum(values[d - 1]), count)
            reach = reach * _from_teacher_row(rows.acceptance[d - 1], d)
            length = length + reach
        # Drafting starts after a generated token, so the last row of a prompt is the first anchor.
        anchors = batch.ahead_mask[..., 0].astype(jnp.float32)
        metrics["expected_acceptance_length"] = (jnp.sum(length * anchors), jnp.sum(anchors))
        covered = anchors
        if ids is not None:
            labels = batch.ahead_tokens[..., 0]
            known = jnp.zeros((self.config.vocab_size,), jnp.float32).at[ids].set(1.0)
            covered = anchors * known[labels]
        metrics["vocabulary_coverage"] = (jnp.sum(covered), jnp.sum(anchors))
        return metrics


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _to_teacher_row(x: Array, d: int) -> Array:
    """Moves what pass d has at row i to row i + d, where the teacher's logits are.

    A row's successors within its document are the next columns wherever the mask of pass d holds.
    """
    d = min(d, x.shape[1])
    kept = x[:, : x.shape[1] - d]
    return jnp.pad(kept, [(0, 0), (d, 0)] + [(0, 0)] * (x.ndim - 2))


def _from_teacher_row(x: Array, d: int) -> Array:
    """Undoes `_to_teacher_row`."""
    d = min(d, x.shape[1])
    return jnp.pad(x[:, d:], [(0, 0), (0, d)] + [(0, 0)] * (x.ndim - 2))
