"""Supervised training of a fresh policy on a task's examples."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.packing import Sample
from jaxspec.rl.losses import LossConfig
from jaxspec.rl.optimizers import make_optimizer
from jaxspec.rl.state import init_state
from jaxspec.rl.step import make_rl_step
from jaxspec.training.batches import build_microbatches
from jaxspec.training.console import Progress
from jaxspec.training.setup import Run


def supervised(run: Run, params: Any, progress: Progress) -> Any:
    """Trains the policy on the task's prompt and reply pairs; returns its parameters.

    The same update as RL with every advantage 1 and no importance weight, whose gradient is that of
    the mean negative log-probability of a reply token.
    """
    settings = run.experiment.policy.sft
    optimizer = make_optimizer(settings.optimizer)
    config = dataclasses.replace(
        run.experiment.step, loss=LossConfig(kind="dapo", importance_cap=None)
    )
    step = make_rl_step(
        run.model, None, config, optimizer, None, run.mesh, compute_dtype=run.compute_dtype
    )
    key = jax.random.key(run.experiment.training.seed)
    state = init_state(key, params, run.policy_table, optimizer, run.mesh)
    count = settings.examples_per_step
    seed = run.experiment.training.seed
    examples = run.experiment.task.sft_examples(count * settings.steps, seed)
    for i in range(settings.steps):
        samples = [
            _sample(run, item, reply, group)
            for group, (item, reply) in enumerate(examples[i * count : (i + 1) * count])
        ]
        packed = build_microbatches(
            samples, run.experiment.packing, num_ahead=1, capacity=count, mesh=run.mesh
        )
        tokens = float(packed.stats.trained)
        state, metrics = step(
            state, packed.batch, jnp.asarray(packed.used, jnp.int32), jnp.float32(tokens)
        )
        progress.phase("training the policy on examples", i + 1, settings.steps)
        if not bool(metrics["skipped_updates"][0] == 0):
            raise ValueError(
                f"SFT update {i} is not finite; lower SftConfig.optimizer's learning_rate="
                f"{settings.optimizer.learning_rate}"
            )
    return state.policy.params


def _sample(run: Run, item: Any, reply: str, group: int) -> Sample:
    ids = [*run.tokenizer.encode(reply), run.stop_ids[0]]
    return Sample(
        prompt=run.encode_prompt(item),
        reply=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        advantage=1.0,
        group=group,
    )
