"""What a policy is made of: one frozen description for the Llama, Qwen2 and Qwen3 families."""

import dataclasses

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("linear", "llama3", "yarn", "dynamic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length.

    Attributes:
      kind: "linear" (positions divided by factor), "llama3" (long wavelengths divided by factor),
        "yarn" (arXiv 2309.00071) or "dynamic" (NTK-aware base, for lengths beyond the original).
      factor: stretch of the context length.
      original_max_position_embeddings: length the model was trained on before stretching.
      low_freq_factor: llama3, wavelengths above original/low_freq_factor are divided by factor.
      high_freq_factor: llama3, wavelengths below original/high_freq_factor are untouched.
      beta_fast: yarn, rotations above which a frequency is untouched.
      beta_slow: yarn, rotations below which a frequency is divided by factor.
      attention_factor: yarn, scale of cos and sin; 0.1 ln(factor) + 1 when None.
      mscale: yarn, numerator of the alternative attention factor.
      mscale_all_dim: yarn, denominator of the alternative attention factor.
      truncate: yarn, round the correction range to whole dimensions.
    """

    kind: str
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RopeScaling.kind is {self.kind!r}; known kinds are {ROPE_KINDS}")
        if self.factor < 1:
            raise ValueError(f"RopeScaling.factor is {self.factor}; it must be at least 1")
        needs = self.kind in ("llama3", "yarn", "dynamic")
        if needs and self.original_max_position_embeddings is None:
            raise ValueError(
                f"RopeScaling.kind={self.kind!r} needs original_max_position_embeddings"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a dense decoder policy.

    Attributes:
      family: "llama", "qwen2" (bias on q, k, v) or "qwen3" (RMSNorm on q and k heads).
      vocab_size: rows of the embedding.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides num_heads.
      head_dim: width of one head (num_heads * head_dim need not equal hidden_size).
      rope_theta: rotary base.
      rope_scaling: stretch of the rotary frequencies, if any.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the head is the embedding.
      qkv_bias: q, k and v projections have a bias.
      qk_norm: q and k heads pass an RMSNorm before RoPE.
      max_position_embeddings: longest sequence the model was made for.
      eos_token_ids: ids that end a reply.
      bos_token_id: id that starts a document, if any.
      pad_token_id: id that fills a row, if any.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"ModelConfig.family is {self.family!r}; known families: {FAMILIES}")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig.{name} is {getattr(self, name)}; must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig.num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim={self.head_dim} must be even for RoPE")
        bad = [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(
                f"ModelConfig.eos_token_ids {bad} lie outside the vocabulary of {self.vocab_size}"
            )
