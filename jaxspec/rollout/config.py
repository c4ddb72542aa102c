"""Settings of a rollout and the arrays it returns."""

import dataclasses
from typing import Any

import flax.struct

from jaxspec.rollout.processors import SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How replies are generated.

    Attributes:
      max_new_tokens: most tokens in a reply, the stop token included.
      batch_size: sequences generated at once; left-over places are masked.
      prompt_buckets: prompt lengths programs are compiled for, ascending; a prompt is padded to
        the next one.
      num_draft_tokens: tokens proposed before each verify; 0 turns the draft off.
      draft_temperature: temperature of the draft's own draws; 0 proposes its arg-max.
      sampling: how tokens are drawn from the policy.
    """

    max_new_tokens: int
    batch_size: int
    prompt_buckets: tuple[int, ...]
    num_draft_tokens: int = 3
    draft_temperature: float = 1.0
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"RolloutConfig.{name}={getattr(self, name)} must be positive")
        buckets = self.prompt_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError(
                f"RolloutConfig.prompt_buckets={buckets} must be ascending positive lengths"
            )
        if self.num_draft_tokens < 0:
            raise ValueError(f"RolloutConfig.num_draft_tokens={self.num_draft_tokens} is negative")
        if self.draft_temperature < 0:
            raise ValueError(
                f"RolloutConfig.draft_temperature={self.draft_temperature} is negative"
            )

    @property
    def slots(self) -> int:
        """Cache slots of the longest bucket, with room for proposals past the cap."""
        return self.prompt_buckets[-1] + self.max_new_tokens + self.num_draft_tokens + 1


@flax.struct.dataclass
class RolloutResult:
    """Replies of b sequences with up to n tokens each; k is the number of drafted tokens.

    Attributes:
      tokens: i32[b, n], 0 from `lengths` on.
      lengths: i32[b], tokens emitted, the stop token included.
      logprobs: f32[b, n], of the emitted tokens under the processed policy distribution.
      raw_logprobs: f32[b, n], of the same under the policy at temperature 1, untruncated.
      finished: bool[b], whether a stop id ended the reply (else its budget did).
      origin: i8[b, n], 1 for tokens drawn from the policy, 2 for accepted draft tokens.
      rejected: i32[b, n], the refused proposal in whose place the token stands, else -1.
      verifies: i32[b], verify passes while the sequence was unfinished.
      accepted: i32[b, k], verifies that emitted at least j accepted tokens, j = 1..k; tokens after
        a stop are not counted.
    """

    # Any, because tree transformations rebuild the class around specs and tracers.
    tokens: Any
    lengths: Any
    logprobs: Any
    raw_logprobs: Any
    finished: Any
    origin: Any
    rejected: Any
    verifies: Any
    accepted: Any


POLICY, DRAFT = 1, 2
"""Values of `RolloutResult.origin`."""
