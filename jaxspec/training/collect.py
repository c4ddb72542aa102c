"""One step's data: prompts, replies, rewards, advantages and the packed batch."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import DraftWeights
from jaxspec.rl.advantages import Advantages, aggregation_weights, group_advantages
from jaxspec.rl.rewards import Reply, Scores, score
from jaxspec.rollout.config import RolloutResult
from jaxspec.rollout.metrics import acceptance_metrics
from jaxspec.training.batches import Microbatches, build_microbatches, reply_samples
from jaxspec.training.setup import Run


@dataclasses.dataclass(frozen=True)
class Replies:
    """Replies to task items, in order, samples_per_prompt to each.

    Attributes:
      items: the item of every reply.
      prompts: ids of each distinct prompt.
      result: the rollout.
      texts: decoded replies.
      scores: rewards and honest metrics.
      seconds: time of rollout and of rewards.
    """

    items: list[Any]
    prompts: list[np.ndarray]
    result: RolloutResult
    texts: list[str]
    scores: Scores
    seconds: dict[str, float]

    def metric(self, name: str) -> np.ndarray:
        """Returns a metric of every reply, NaN where it has none."""
        if name == "reward":
            return np.where(self.scores.valid, self.scores.rewards, np.nan)
        return np.array([m.get(name, np.nan) for m in self.scores.metrics], np.float64)

    @property
    def metric_names(self) -> list[str]:
        """Names of the task's own metrics."""
        return sorted({name for metrics in self.scores.metrics for name in metrics})


@dataclasses.dataclass(frozen=True)
class Update:
    """What one update takes.

    Attributes:
      batch: packed microbatches.
      denominator: global denominator of the policy loss.
    """

    batch: Microbatches
    denominator: float


@dataclasses.dataclass(frozen=True)
class StepData:
    """A step's batch and what is known before its updates.

    Attributes:
      replies: the rollout and its rewards.
      updates: those that have anything to learn from, in order.
      record: numbers for the log.
    """

    replies: Replies
    updates: list[Update]
    record: dict[str, Any]


def reply(
    run: Run,
    policy_params: Any,
    draft_weights: DraftWeights | None,
    items: list[Any],
    key: jax.Array,
    *,
    samples_per_prompt: int,
    with_draft: bool = True,
) -> Replies:
    """Replies to items and scores the replies."""
    prompts = [run.encode_prompt(item) for item in items]
    start = time.perf_counter()
    result = run.sampler(with_draft=with_draft)(
        policy_params, draft_weights, prompts, key, samples_per_prompt=samples_per_prompt
    )
    rolled = time.perf_counter()
    each = [item for item in items for _ in range(samples_per_prompt)]
    stops = set(run.stop_ids)
    texts = [
        run.tokenizer.decode([t for t in row[:n].tolist() if t not in stops])
        for row, n in zip(result.tokens, result.lengths, strict=True)
    ]
    told = [
        Reply(text=text, num_tokens=int(n), finished=bool(ended))
        for text, n, ended in zip(texts, result.lengths, result.finished, strict=True)
    ]
    scores = score(
        run.experiment.task.reward,
        each,
        told,
        timeout_s=run.experiment.training.reward_timeout_s,
    )
    return Replies(
        items=each,
        prompts=prompts,
        result=result,
        texts=texts,
        scores=scores,
        seconds={"rollout": rolled - start, "reward": time.perf_counter() - rolled},
    )


def collect(
    run: Run, policy_params: Any, draft_weights: DraftWeights | None, step: int, key: jax.Array
) -> StepData:
    """Gathers everything that step `step` (from 0) learns from; its arguments alone decide it."""
    training = run.experiment.training
    first = step * training.prompts_per_step
    items = [
        run.experiment.task.train_prompt(first + i, training.seed)
        for i in range(training.prompts_per_step)
    ]
    each = training.samples_per_prompt
    replies = reply(
        run,
        policy_params,
        draft_weights,
        items,
        jax.random.fold_in(key, step),
        samples_per_prompt=each,
    )
    start = time.perf_counter()
    groups = np.repeat(np.arange(len(items)), each)
    advantages = group_advantages(
        replies.scores.rewards, groups, kind=training.advantage, valid=replies.scores.valid
    )
    keep = advantages.keep if training.drop_zero_variance else np.ones(len(groups), bool)
    parts = np.array_split(np.arange(len(groups)), training.updates_per_step)
    made = [_update(run, replies, advantages, keep, part) for part in parts]
    updates = [update for update in made if update.batch.used]
    stats = [update.batch.stats for update in updates]
    slots = sum(s.rows * s.row_length for s in stats)
    filled = sum(s.used for s in stats)
    packed = time.perf_counter()
    record = summarise(replies) | {
        "zero_variance_groups": advantages.zero_variance,
        "groups_used": len(np.unique(groups[keep])),
        "invalid_rewards": advantages.invalid,
        "packing_waste": 1 - filled / slots if slots else 0.0,
        "seconds": replies.seconds | {"pack": packed - start},
    }
    return StepData(replies=replies, updates=updates, record=record)


def _update(
    run: Run, replies: Replies, advantages: Advantages, keep: np.ndarray, part: np.ndarray
) -> Update:
    """Packs those of a step's replies whose indices are in `part` (whole groups)."""
    mine = np.isin(np.arange(len(keep)), part)
    weights, denominator = aggregation_weights(
        run.experiment.step.loss.aggregation,
        replies.result.lengths,
        run.experiment.rollout.max_new_tokens,
        mine & keep & (advantages.weights > 0),
    )
    samples = reply_samples(
        replies.prompts,
        replies.result,
        run.experiment.training.samples_per_prompt,
        advantage=advantages.values,
        weight=weights,
    )
    batch = build_microbatches(
        [samples[i] for i in part if keep[i]],
        run.experiment.packing,
        num_ahead=run.num_ahead,
        capacity=len(part),
        mesh=run.mesh,
    )
    return Update(batch=batch, denominator=denominator)


def summarise(replies: Replies) -> dict[str, Any]:
    """Returns the numbers of a rollout: reward, honest metrics, lengths, acceptance, speed."""
    result = replies.result
    tokens = int(result.lengths.sum())
    record: dict[str, Any] = {"reward": replies.scores.mean("reward")}
    record |= {name: replies.scores.mean(name) for name in replies.metric_names}
    record |= {
        "reply_length": float(result.lengths.mean()),
        "finished": float(result.finished.mean()),
        "tokens_per_second": tokens / max(replies.seconds["rollout"], 1e-9),
    }
    if result.accepted.shape[1]:
        emitted = int((result.lengths - 1).sum())
        record |= acceptance_metrics(
            int(result.verifies.sum()), result.accepted.sum(axis=0).tolist(), emitted
        )
    return record
