"""Held-out evaluation, and the speed of rollouts with and without the draft."""

import time
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import DraftWeights
from jaxspec.rollout.config import RolloutResult
from jaxspec.training.collect import Replies, reply, summarise
from jaxspec.training.console import Progress
from jaxspec.training.setup import Run


def evaluate(
    run: Run, policy_params: Any, draft_weights: DraftWeights | None, name: str
) -> tuple[dict[str, Any], Replies | None]:
    """Replies once to each held-out prompt and scores the replies.

    The same prompts and the same keys at every evaluation, so that two of them can be compared
    prompt by prompt.

    Args:
      run: the run.
      policy_params: the policy.
      draft_weights: the draft that speeds the replies up, or None.
      name: what is evaluated, for the report.

    Returns:
      A record with the mean of everything and, under "per_prompt", each prompt's reward and
      metrics; and the replies themselves. (An empty record when nothing is to be evaluated.)
    """
    count = run.experiment.evaluation.prompts
    items = run.experiment.task.held_out()[:count]
    if not items:
        return {}, None
    key = jax.random.fold_in(jax.random.key(run.experiment.training.seed), 4)
    replies = reply(
        run,
        policy_params,
        draft_weights,
        items,
        key,
        samples_per_prompt=1,
        with_draft=draft_weights is not None,
    )
    record = {"name": name, "prompts": len(items), "seconds": replies.seconds}
    record |= summarise(replies)
    names = ["reward", *replies.metric_names]
    per_prompt = {metric: replies.metric(metric).tolist() for metric in names}
    per_prompt["reply_length"] = replies.result.lengths.tolist()
    return record | {"per_prompt": per_prompt}, replies


def measure_speed(
    run: Run,
    policy_params: Any,
    draft_weights: DraftWeights,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Times rollouts with and without the draft, interleaved, on the same prompts and budget.

    Returns:
      A record for each batch size: seconds and tokens of every trial, with and without, and the
      tokens that a verify emitted.
    """
    settings = run.experiment.evaluation
    records = []
    usual = (run.experiment.rollout.num_draft_tokens,) * len(settings.speed_batch_sizes)
    drafted = settings.speed_draft_tokens or usual
    for size, num_draft_tokens in zip(settings.speed_batch_sizes, drafted, strict=True):
        samplers = {
            "draft": run.sampler(batch_size=size, num_draft_tokens=num_draft_tokens),
            "plain": run.sampler(batch_size=size, with_draft=False),
        }
        items = run.experiment.task.held_out()
        # Both samplers share one layout, made before the clock runs.
        prepared = samplers["plain"].prepare(policy_params)
        count = settings.trials_at(size, run.experiment.rollout.batch_size)
        trials: dict[str, list[dict[str, float]]] = {"draft": [], "plain": []}
        verified: list[RolloutResult] = []
        # The first trial compiles and is thrown away.
        for trial in range(count + 1):
            chosen = [items[(trial * size + i) % len(items)] for i in range(size)]
            prompts = [run.encode_prompt(item) for item in chosen]
            # Whichever goes first may find the machine in another state: take turns.
            order = ("draft", "plain") if trial % 2 else ("plain", "draft")
            for name in order:
                weights = draft_weights if name == "draft" else None
                key = jax.random.fold_in(jax.random.key(run.experiment.training.seed), 100 + trial)
                start = time.perf_counter()
                result = samplers[name](prepared, weights, prompts, key)
                seconds = time.perf_counter() - start
                if trial:
                    tokens = int(np.sum(result.lengths))
                    trials[name].append({"seconds": seconds, "tokens": tokens})
                    if name == "draft":
                        verified.append(result)
            progress.phase(f"timing rollouts of {size}", trial, count)
        verifies = sum(int(r.verifies.sum()) for r in verified)
        emitted = sum(int((r.lengths - 1).sum()) for r in verified)
        records.append(
            {
                "batch_size": size,
                "num_draft_tokens": num_draft_tokens,
                "acceptance_length": emitted / max(verifies, 1),
            }
            | trials
        )
    return records
