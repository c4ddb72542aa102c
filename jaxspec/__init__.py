"""Reinforcement learning of language models with drafts that learn in the same step.

The names below are imported on first use, so that `import jaxspec` does no work.
"""

import importlib
from typing import Any

_EXPORTS = {
    "CheckpointConfig": "jaxspec.config",
    "ComparisonTask": "jaxspec.tasks.comparison",
    "DraftConfig": "jaxspec.config",
    "Eagle3": "jaxspec.drafts.eagle3",
    "Eagle3Config": "jaxspec.drafts.eagle3_config",
    "EvaluationConfig": "jaxspec.config",
    "Experiment": "jaxspec.config",
    "LossConfig": "jaxspec.rl.losses",
    "MeshConfig": "jaxspec.mesh",
    "ModelConfig": "jaxspec.models.config",
    "OptimizerConfig": "jaxspec.rl.optimizers",
    "PackingConfig": "jaxspec.packing",
    "PolicyConfig": "jaxspec.config",
    "ReasoningTask": "jaxspec.tasks.reasoning",
    "RewardResult": "jaxspec.rl.rewards",
    "RolloutConfig": "jaxspec.rollout.config",
    "Sampler": "jaxspec.rollout.sampler",
    "SamplingConfig": "jaxspec.rollout.processors",
    "SftConfig": "jaxspec.config",
    "StepConfig": "jaxspec.rl.step",
    "SumsTask": "jaxspec.tasks.sums",
    "TrainResult": "jaxspec.training.loop",
    "TrainingConfig": "jaxspec.config",
    "WarmUpConfig": "jaxspec.config",
    "load_experiment": "jaxspec.config",
    "load_generator": "jaxspec.inference",
    "load_policy": "jaxspec.io.policy",
    "load_tokenizer": "jaxspec.io.tokenizer",
    "train": "jaxspec.training.loop",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
