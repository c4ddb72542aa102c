"""What every draft is to the rollout, the step and the exporter: one protocol and its data."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from jaxspec.packing import PackedBatch
from jaxspec.params import Table

# (log-probabilities [batch, draft vocabulary], place in the block from 0) -> index [batch].
Draw = Callable[[Array, int], Array]
Metrics = dict[str, tuple[Array, Array]]


@flax.struct.dataclass
class DraftWeights:
    """A draft's numbers.

    Attributes:
      params: trained parameters.
      buffers: constants; {"vocab_ids": i32[draft vocabulary], ascending target ids} when the
        draft's vocabulary is a part of the target's, else {}.
    """

    params: Any
    buffers: Any


@flax.struct.dataclass
class TargetView:
    """All that a draft may see of the policy, every array behind stop_gradient.

    Attributes:
      embedding: [vocab, dim].
      head: [vocab, dim].
      taps: [row, token, taps * dim], outputs of the tapped layers in ascending order.
      hidden: [row, token, dim] after the final norm; with the head it gives the teacher's logits.
      log_normaliser: f32[row, token], natural log-sum-exp of the raw logits over the whole
        vocabulary; None where it isn't known.
    """

    embedding: Any
    head: Any
    taps: Any
    hidden: Any
    log_normaliser: Any = None


def target_view(
    embedding: Float[Array, "vocab dim"],
    head: Float[Array, "vocab dim"],
    taps: Float[Array, "row token features"],
    hidden: Float[Array, "row token dim"],
    log_normaliser: Float[Array, "row token"] | None = None,
) -> TargetView:
    """Builds the view and cuts it off from the policy's gradient."""
    return jax.lax.stop_gradient(
        TargetView(
            embedding=embedding,
            head=head,
            taps=taps,
            hidden=hidden,
            log_normaliser=log_normaliser,
        )
    )


@flax.struct.dataclass
class DistillOutput:
    """A draft's loss over the rows that this device holds.

    Attributes:
      numerator: f32 scalar, sum of the weighted row losses; only this carries a gradient. Its
        denominator is `distill_denominator` of the whole global batch.
      metrics: name -> (numerator, denominator), sums over the local rows.
    """

    numerator: Any
    metrics: Any


@flax.struct.dataclass
class DraftState:
    """A draft's side of decoding; slot i belongs to the row of position i.

    Attributes:
      keys: [batch, kv_heads, slots, head_dim]. Slots at and past the committed length hold
        garbage that the next commit overwrites, so undoing rows needs no work.
      values: as keys.
      hidden: f32[batch, dim], output of the last committed row; the first proposal reads it.
    """

    keys: Any
    values: Any
    hidden: Any


@flax.struct.dataclass
class Proposal:
    """What a draft proposes to one verification.

    Attributes:
      tokens: i32[batch, k], ids of the target's vocabulary.
      probs: f32[batch, k, draft vocabulary], the distribution each token was drawn from; None
        when the tokens are arg-maxes, whose distribution is one-hot.
      state: the state to commit to.
    """

    tokens: Any
    probs: Any
    state: Any


@runtime_checkable
class Draft(Protocol):
    """Pure functions of a draft; an instance is hashable and fixed under jit.

    Rows: row i pairs the policy's taps at position i with the embedding of x_{i+1}.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based policy layers whose output is tapped, ascending."""
        ...

    @property
    def num_ahead(self) -> int:
        """Tokens that packing must look ahead: `pack(..., num_ahead=draft.num_ahead)`."""
        ...

    def param_table(self) -> Table:
        """Describes the trained parameters."""
        ...

    def buffer_table(self) -> Table:
        """Describes the constants."""
        ...

    def init(
        self,
        key: Key[Array, ""],
        policy_params: Any,
        vocab_ids: Int[np.ndarray, " draft_vocab"] | None = None,
        mesh: Mesh | None = None,
    ) -> DraftWeights:
        """Draws fresh weights that start from the policy's head."""
        ...

    def distill_denominator(self, batch: PackedBatch) -> Float[Array, ""]:
        """Returns the loss's denominator over the rows of this batch."""
        ...

    def distill(
        self,
        params: Any,
        buffers: Any,
        view: TargetView,
        batch: PackedBatch,
        *,
        compute_dtype: str = "float32",
    ) -> DistillOutput:
        """Returns the loss of the draft against the policy on a packed batch."""
        ...

    def new_state(self, batch: int, slots: int, dtype: str) -> DraftState:
        """Returns the state of sequences of which nothing is committed."""
        ...

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
        """Appends rows with the policy's own taps."""
        ...

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
        """Proposes k tokens after the committed rows."""
        ...
