"""An experiment: every setting of a run, as frozen dataclasses.

Gin fills them, notebooks build them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec import gin_config
from jaxspec.drafts import losses as draft_losses
from jaxspec.mesh import MeshConfig
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.packing import PackingConfig
from jaxspec.rl.losses import LossConfig
from jaxspec.rl.optimizers import OptimizerConfig
from jaxspec.rl.step import StepConfig
from jaxspec.rollout.config import RolloutConfig
from jaxspec.rollout.processors import SamplingConfig
from jaxspec.tasks.comparison import ComparisonTask
from jaxspec.tasks.reasoning import ReasoningTask
from jaxspec.tasks.sums import SumsTask

ADVANTAGES = ("grpo", "dr_grpo")
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")


def _positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < 1:
            raise ValueError(f"{type(owner).__name__}.{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised training of a policy that starts from nothing.

    Attributes:
      steps: updates.
      examples_per_step: prompt and reply pairs in an update, drawn from the task.
      optimizer: its own optimiser.
    """

    steps: int
    examples_per_step: int
    optimizer: OptimizerConfig

    def __post_init__(self):
        _positive(self, "steps", "examples_per_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Where the policy comes from: stored weights, or a shape to train from nothing.

    Attributes:
      source: a Hugging Face folder, a .gguf file or "package:NAME"; "" for a fresh policy.
      model: shape of a fresh policy. With a source, the shape it must have, by which a dry run
        does without the weights.
      alphabet: characters of a fresh policy's tokenizer.
      sft: how a fresh policy is trained before RL.
    """

    source: str = ""
    model: ModelConfig | None = None
    alphabet: str = ""
    sft: SftConfig | None = None

    def __post_init__(self):
        if not self.source and self.model is None:
            raise ValueError("PolicyConfig.source and PolicyConfig.model are both unset; give one")
        if bool(self.source) == bool(self.alphabet):
            raise ValueError(
                f"PolicyConfig.source={self.source!r} and PolicyConfig.alphabet="
                f"{self.alphabet!r}: a stored policy brings its tokenizer, a fresh one needs an "
                "alphabet"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUpConfig:
    """Fitting the draft to the policy's own replies before RL.

    Attributes:
      prompts: training prompts the policy replies to.
      samples_per_prompt: replies to each.
      steps: draft updates over these replies; 0 leaves the draft as it is.
      rows_per_step: packed rows in one update.
      optimizer: its own optimiser.
    """

    prompts: int
    samples_per_prompt: int
    steps: int
    rows_per_step: int
    optimizer: OptimizerConfig

    def __post_init__(self):
        _positive(self, "prompts", "samples_per_prompt", "rows_per_step")
        if self.steps < 0:
            raise ValueError(f"WarmUpConfig.steps={self.steps} is negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The EAGLE-3 draft.

    Attributes:
      enabled: False trains the policy alone and decodes plainly.
      num_passes: training passes, one for each token it shall draft in a row;
        RolloutConfig.num_draft_tokens when 0.
      source: an EAGLE-3 folder to start from; "" for a fresh draft.
      vocab_size: rows of a fresh draft's head, chosen by how often the policy says them; 0 is the
        whole vocabulary.
      tap_layers: tapped policy layers; an early, a middle and a late one when empty.
      intermediate_size: width of the MLP; the policy's when 0.
      num_heads: query heads; the policy's when 0.
      num_kv_heads: key/value heads; the policy's when 0.
      norm_before_fc: RMSNorm over the taps before they are fused.
      norm_before_residual: the residual is the normed feature.
      objective: "cross_entropy", "tv" or "lk".
      pass_weights: weight of each pass in the loss; all 1 when empty.
      update_every: steps between updates of the draft; 0 keeps the warm-up draft.
      optimizer: its own optimiser.
      warm_up: how it is fitted before RL; None skips that.
    """

    enabled: bool = True
    num_passes: int = 0
    source: str = ""
    vocab_size: int = 0
    tap_layers: tuple[int, ...] = ()
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    objective: str = "cross_entropy"
    pass_weights: tuple[float, ...] = ()
    update_every: int = 1
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-4)
    )
    warm_up: WarmUpConfig | None = None

    def __post_init__(self):
        for name in (
            "num_passes",
            "vocab_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "update_every",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"DraftConfig.{name}={getattr(self, name)} is negative")
        if self.objective not in draft_losses.OBJECTIVES:
            raise ValueError(
                f"DraftConfig.objective is {self.objective!r}; known: {draft_losses.OBJECTIVES}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run itself.

    Attributes:
      steps: co-training steps.
      prompts_per_step: prompts replied to in a step.
      samples_per_prompt: replies to each prompt, one group.
      updates_per_step: updates that a step's groups are split over; above 1 the policy has moved
        when the later ones are taken, and the clip of the loss holds it near the sampler's.
      max_minutes: wall-clock limit of the whole run, evaluation and report included; the steps end
        early to keep it. 0 is no limit.
      advantage: "grpo" (divided by the group's deviation) or "dr_grpo" (centred only).
      drop_zero_variance: leave groups whose rewards are all equal out of the update.
      reward_timeout_s: seconds a reward function may take for one reply.
      max_nonfinite_in_a_row: skipped updates in a row that stop the run.
      seed: every draw of the run derives from it.
    """

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    updates_per_step: int = 1
    max_minutes: float = 0.0
    advantage: str = "grpo"
    drop_zero_variance: bool = True
    reward_timeout_s: float = 5.0
    max_nonfinite_in_a_row: int = 3
    seed: int = 0

    def __post_init__(self):
        _positive(self, "steps", "prompts_per_step", "samples_per_prompt")
        _positive(self, "updates_per_step", "max_nonfinite_in_a_row")
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"TrainingConfig.prompts_per_step={self.prompts_per_step} is not a multiple of "
                f"TrainingConfig.updates_per_step={self.updates_per_step}"
            )
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"TrainingConfig.samples_per_prompt={self.samples_per_prompt}: group-relative "
                "advantages need at least 2"
            )
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"TrainingConfig.advantage is {self.advantage!r}; known: {ADVANTAGES}")
        if self.max_minutes < 0 or self.reward_timeout_s <= 0:
            raise ValueError(
                f"TrainingConfig.max_minutes={self.max_minutes} and reward_timeout_s="
                f"{self.reward_timeout_s} must not be negative (nor the latter zero)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation before and after training, and the speed measurement.

    Attributes:
      prompts: held-out prompts replied to; 0 evaluates nothing.
      every: steps between evaluations in between; 0 for none.
      speed_batch_sizes: batch sizes at which rollouts are timed with and without the draft.
      speed_draft_tokens: tokens drafted before each verify at each of them, since more pay where
        the batch is small; RolloutConfig.num_draft_tokens when empty.
      speed_trials: interleaved trials of each; three times as many where the batch is an eighth of
        the run's own or smaller, since those are short and scatter.
    """

    prompts: int = 96
    every: int = 0
    speed_batch_sizes: tuple[int, ...] = (1,)
    speed_draft_tokens: tuple[int, ...] = ()
    speed_trials: int = 3

    def __post_init__(self):
        for name in ("prompts", "every", "speed_trials"):
            if getattr(self, name) < 0:
                raise ValueError(f"EvaluationConfig.{name}={getattr(self, name)} is negative")
        if any(b < 1 for b in self.speed_batch_sizes):
            raise ValueError(
                f"EvaluationConfig.speed_batch_sizes={self.speed_batch_sizes} must be positive"
            )
        tokens = self.speed_draft_tokens
        if tokens and (len(tokens) != len(self.speed_batch_sizes) or min(tokens) < 1):
            raise ValueError(
                f"EvaluationConfig.speed_draft_tokens={tokens} must be empty or give a positive "
                f"number for each of EvaluationConfig.speed_batch_sizes={self.speed_batch_sizes}"
            )

    def trials_at(self, batch_size: int, own_batch_size: int) -> int:
        """Returns how often rollouts of a batch size are timed."""
        return self.speed_trials * (3 if 8 * batch_size <= own_batch_size else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk.

    Attributes:
      every: steps between checkpoints; the last step always has one.
      keep_latest: newest checkpoints kept.
      keep_best: checkpoints kept for their reward besides these.
    """

    every: int = 10
    keep_latest: int = 2
    keep_best: int = 1

    def __post_init__(self):
        _positive(self, "every", "keep_latest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that makes a run what it is.

    Attributes:
      name: a few words, shown in the report.
      policy: the policy.
      task: prompts with verifiable answers (`jaxspec.tasks`).
      training: the run itself.
      rollout: how replies are generated.
      packing: how replies become rows.
      policy_optimizer: the policy's own optimiser.
      draft: the draft.
      step: the update.
      evaluation: held-out evaluation and speed measurement.
      checkpoint: what is kept.
      mesh: devices.
      compute_dtype: "float32", "bfloat16", or "auto" to take the faster by a short probe.
    """

    name: str
    policy: PolicyConfig
    task: Any
    training: TrainingConfig
    rollout: RolloutConfig
    packing: PackingConfig
    policy_optimizer: OptimizerConfig
    draft: DraftConfig = dataclasses.field(default_factory=DraftConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    compute_dtype: str = "auto"

    def __post_init__(self):
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"Experiment.compute_dtype is {self.compute_dtype!r}; known: {COMPUTE_DTYPES}"
            )
        rollout, training, sampling = self.rollout, self.training, self.rollout.sampling
        if sampling.temperature == 0:
            raise ValueError(
                "SamplingConfig.temperature=0: training needs rollouts drawn at a temperature "
                "above 0"
            )
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            raise ValueError(
                f"SamplingConfig.top_k={sampling.top_k}, top_p={sampling.top_p}, min_p="
                f"{sampling.min_p}: training draws from the whole distribution, which the update "
                "recomputes; set them to 0, 1 and 0"
            )
        if training.updates_per_step > 1 and self.step.loss.on_policy:
            raise ValueError(
                f"TrainingConfig.updates_per_step={training.updates_per_step}: after the first "
                "update the replies are not the policy's own; set LossConfig.on_policy=False"
            )
        if self.draft.enabled and rollout.num_draft_tokens < 1:
            raise ValueError(
                f"RolloutConfig.num_draft_tokens={rollout.num_draft_tokens} with a draft; raise "
                "it, or set DraftConfig.enabled=False"
            )
        per_device = rollout.batch_size // self.mesh.data
        if rollout.batch_size % self.mesh.data or per_device % training.samples_per_prompt:
            raise ValueError(
                f"RolloutConfig.batch_size={rollout.batch_size} on MeshConfig.data="
                f"{self.mesh.data} devices is not a whole number of groups of "
                f"TrainingConfig.samples_per_prompt={training.samples_per_prompt}"
            )
        if self.packing.rows_per_microbatch % self.mesh.data:
            raise ValueError(
                f"PackingConfig.rows_per_microbatch={self.packing.rows_per_microbatch} is not a "
                f"multiple of MeshConfig.data={self.mesh.data}"
            )
        longest = rollout.prompt_buckets[-1] + rollout.max_new_tokens
        if self.packing.row_length < longest:
            raise ValueError(
                f"PackingConfig.row_length={self.packing.row_length} is shorter than the longest "
                f"document of {longest} tokens (RolloutConfig.prompt_buckets up to "
                f"{rollout.prompt_buckets[-1]} and max_new_tokens={rollout.max_new_tokens})"
            )


CONFIGURABLES = (
    Experiment,
    PolicyConfig,
    SftConfig,
    DraftConfig,
    WarmUpConfig,
    TrainingConfig,
    EvaluationConfig,
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    PackingConfig,
    LossConfig,
    OptimizerConfig,
    StepConfig,
    RolloutConfig,
    RopeScaling,
    SamplingConfig,
    ComparisonTask,
    ReasoningTask,
    SumsTask,
)


def register_all() -> None:
    """Makes every setting known to gin; further tasks register themselves the same way."""
    for cls in CONFIGURABLES:
        gin_config.register(cls)


def load_experiment(gin_files: Sequence[str], gin_bindings: Sequence[str] = ()) -> Experiment:
    """Reads an experiment from gin files and single bindings.

    Raises:
      ValueError: for an unknown, unused, mistyped or out-of-range setting, naming it.
    """
    register_all()
    return gin_config.load(Experiment, gin_files, gin_bindings)


def operative_config(experiment: Experiment) -> str:
    """Returns a configuration that loads as the same experiment."""
    register_all()
    return gin_config.operative_config(experiment)
