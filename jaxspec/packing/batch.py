"""What packing takes and gives: samples, packed batches, settings and statistics."""

import dataclasses
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How replies become rows.

    Attributes:
      row_length: tokens in a row; no document may be longer.
      rows_per_microbatch: rows that one microbatch of the update holds.
      share_prompts: whether replies to one prompt share a stored copy of it.
      packed: whether a row may hold several documents; False gives each its own row.
    """

    row_length: int
    rows_per_microbatch: int = 1
    share_prompts: bool = True
    packed: bool = True

    def __post_init__(self):
        for name in ("row_length", "rows_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"PackingConfig.{name} is {getattr(self, name)}; it must be at least 1"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with one sampled reply, as token ids.

    Attributes:
      prompt: ids of the prompt, at least one.
      reply: sampled ids, the stop token included.
      logprobs: log-probability of each reply token under the policy that sampled it.
      advantage: advantage of every token of the reply.
      mask: which reply tokens are trained; all of them when None.
      group: replies with one group number answer one prompt.
      weight: weight of each trained token in the policy loss.
    """

    prompt: Int[np.ndarray, " prompt"]
    reply: Int[np.ndarray, " reply"]
    logprobs: Float[np.ndarray, " _reply"]
    advantage: SupportsFloat
    mask: Bool[np.ndarray, " _reply"] | None = None
    group: SupportsIndex = 0
    weight: SupportsFloat = 1.0

    def __post_init__(self):
        mask = np.ones(len(self.reply), bool) if self.mask is None else self.mask
        converted = {
            "prompt": np.asarray(self.prompt, np.int32),
            "reply": np.asarray(self.reply, np.int32),
            "logprobs": np.asarray(self.logprobs, np.float32),
            "advantage": float(self.advantage),
            "mask": np.asarray(mask, bool),
            "group": int(self.group),
            "weight": float(self.weight),
        }
        for name, value in converted.items():
            object.__setattr__(self, name, value)
        if not len(self.prompt):
            raise ValueError("Sample.prompt is empty; the first reply token needs a row before it")
        for name in ("logprobs", "mask"):
            if len(getattr(self, name)) != len(self.reply):
                raise ValueError(
                    f"Sample.{name} has {len(getattr(self, name))} entries for a reply of "
                    f"{len(self.reply)} tokens"
                )
        numbers = [self.advantage, self.weight, *self.logprobs[self.mask]]
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"group {self.group}: advantage {self.advantage}, weight {self.weight} or a "
                "log-probability of the reply is not finite"
            )


@flax.struct.dataclass
class PackedBatch:
    """Rows of packed documents; everything at row i belongs to the row that predicts.

    Leading axes are [row, token], or [microbatch, row, token] once split. A document's token at
    position i is x_i, and A is the number of tokens looked ahead (K + 1 for K draft passes).

    Attributes:
      tokens: i32[..., token], x_i; 0 in padding.
      segment_ids: i32[..., token], 0 in padding, else one number in the row for each reply or
        shared prompt.
      positions: i32[..., token], i, counted from the start of the prompt.
      intervals: i32[..., token, n, 2], half-open ranges of columns of this row that the token
        sees; disjoint, empty where lo >= hi. n is 2 where prompts are shared (own range, then
        the prompt's), else 1.
      ahead_tokens: i32[..., token, A], entry d - 1 is x_{i+d}, 0 past the document's end.
      ahead_mask: bool[..., token, A], whether x_{i+d} exists and is a trained token. False in
        shared prompts: the rows before a reply are copied into each reply's segment. Where it
        is true, the next d - 1 columns hold x_{i+1} .. x_{i+d-1} of the same segment.
      behaviour_logprobs: f32[..., token], log-probability of x_{i+1} when it was sampled.
      advantages: f32[..., token], advantage of x_{i+1}.
      token_weights: f32[..., token], weight of x_{i+1} in the policy loss. These three are 0
        where ahead_mask[..., 0] is False.
    """

    # Any, because tree transformations rebuild the class around specs and tracers.
    tokens: Any
    segment_ids: Any
    positions: Any
    intervals: Any
    ahead_tokens: Any
    ahead_mask: Any
    behaviour_logprobs: Any
    advantages: Any
    token_weights: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackStats:
    """What packing cost.

    Attributes:
      samples: samples packed.
      rows: rows that hold a document.
      padding_rows: empty rows added to reach a multiple.
      row_length: tokens in a row.
      used: tokens stored in rows, copies included.
      saved: tokens not stored because their prompt is shared.
      trained: tokens that are a label of the policy loss.
      prompt_copies: shared prompts stored.
    """

    samples: int
    rows: int
    padding_rows: int
    row_length: int
    used: int
    saved: int
    trained: int
    prompt_copies: int

    @property
    def waste(self) -> float:
        """Fraction of the tokens of non-empty rows that is padding."""
        return 1.0 - self.used / (self.rows * self.row_length) if self.rows else 0.0


def split_microbatches(batch: Tree, rows_per_microbatch: int) -> Tree:
    """Splits the leading row axis into [microbatch, row].

    Raises:
      ValueError: the rows are no multiple of `rows_per_microbatch`.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % rows_per_microbatch:
        raise ValueError(
            f"{rows} rows cannot be split into microbatches of {rows_per_microbatch}; pack with "
            "rows_multiple a multiple of PackingConfig.rows_per_microbatch"
        )
    return jax.tree.map(
        lambda x: x.reshape(rows // rows_per_microbatch, rows_per_microbatch, *x.shape[1:]), batch
    )
