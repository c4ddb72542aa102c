"""Shape and objective of an EAGLE-3 draft."""

import dataclasses
from typing import Any

from jaxspec.drafts.losses import OBJECTIVES
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.policy import check_taps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape and objective of an EAGLE-3 draft.

    Attributes:
      hidden_size: width, the policy's own.
      intermediate_size: width of the gated MLP.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides num_heads.
      head_dim: width of one head.
      rope_theta: rotary base.
      rope_scaling: stretch of the rotary frequencies, if any.
      rms_norm_eps: epsilon of every RMSNorm.
      max_position_embeddings: longest sequence; exported for engines that size tables by it.
      tap_layers: 0-based policy layers whose output (before the final norm) is tapped, ascending.
      vocab_size: the policy's vocabulary.
      draft_vocab_size: rows of the draft's head.
      num_passes: training passes K, best equal to the tokens drafted per verification.
      pass_weights: weight of each pass in the loss; all 1 when empty.
      norm_before_residual: the residual is the normed feature instead of the feature.
      norm_before_fc: RMSNorm over the concatenated taps before they are fused.
      objective: one of `losses.OBJECTIVES`.
      loss_chunk: rows whose logits exist at one time in the loss.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tap_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    num_passes: int = 3
    pass_weights: tuple[float, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    objective: str = "cross_entropy"
    loss_chunk: int = 256

    def __post_init__(self):
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "draft_vocab_size",
            "max_position_embeddings",
            "num_passes",
            "loss_chunk",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"Eagle3Config.{name} is {getattr(self, name)}; must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Eagle3Config.num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"Eagle3Config.head_dim={self.head_dim} must be even for RoPE")
        taps = tuple(self.tap_layers)
        if not taps or taps[0] < 0 or list(taps) != sorted(set(taps)):
            raise ValueError(
                f"Eagle3Config.tap_layers={taps} must be at least one 0-based layer, ascending and "
                "unique"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"Eagle3Config.draft_vocab_size={self.draft_vocab_size} exceeds "
                f"vocab_size={self.vocab_size}"
            )
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"Eagle3Config.objective is {self.objective!r}; known are {OBJECTIVES}"
            )
        if self.pass_weights and len(self.pass_weights) != self.num_passes:
            raise ValueError(
                f"Eagle3Config.pass_weights has {len(self.pass_weights)} entries for "
                f"num_passes={self.num_passes}"
            )
        if any(w <= 0 for w in self.pass_weights):
            raise ValueError(
                f"Eagle3Config.pass_weights={self.pass_weights} must be positive; lower num_passes "
                "to leave a pass out"
            )

    @classmethod
    def from_policy(
        cls,
        model: ModelConfig,
        *,
        num_passes: int = 3,
        tap_layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        **settings: Any,
    ) -> "Eagle3Config":
        """Describes a draft for a policy; what isn't given is as in the policy.

        Args:
          model: the policy.
          num_passes: training passes.
          tap_layers: tapped layers; `default_taps` of the policy when None.
          draft_vocab_size: size of the draft's vocabulary; the whole one when None.
          intermediate_size: width of the MLP.
          num_heads: query heads.
          num_kv_heads: key/value heads.
          head_dim: width of one head.
          **settings: other fields of the configuration.

        Raises:
          ValueError: a tapped layer isn't one of the policy's, or a field is out of bounds.
        """
        taps = default_taps(model.num_layers) if tap_layers is None else tuple(tap_layers)
        check_taps(taps, model.num_layers)
        copied = ("rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings")
        fields = {name: getattr(model, name) for name in copied}
        fields |= {
            "hidden_size": model.hidden_size,
            "intermediate_size": intermediate_size or model.intermediate_size,
            "num_heads": num_heads or model.num_heads,
            "num_kv_heads": num_kv_heads or model.num_kv_heads,
            "head_dim": head_dim or model.head_dim,
            "tap_layers": taps,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": draft_vocab_size or model.vocab_size,
            "num_passes": num_passes,
        }
        return cls(**(fields | settings))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns an early, a middle and a late layer, as published EAGLE-3 drafts tap them."""
    wanted = {1, max(0, num_layers // 2 - 1), max(1, num_layers - 4)}
    return tuple(sorted({min(layer, num_layers - 1) for layer in wanted}))
