"""Fitting a draft to the policy's own replies before the policy moves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import Experiment, WarmUpConfig
from jaxspec.drafts.base import DraftWeights
from jaxspec.drafts.vocabulary import choose_vocabulary
from jaxspec.io.draft_formats import read_eagle3, write_eagle3
from jaxspec.packing import Sample, pack
from jaxspec.params import place_params
from jaxspec.rl.distill import make_distill_step
from jaxspec.rl.forward import make_features
from jaxspec.rl.optimizers import init_optimizer, make_optimizer
from jaxspec.rl.state import ModelState
from jaxspec.training.batches import place_rows, reply_samples
from jaxspec.training.console import Progress
from jaxspec.training.setup import Run, build
from jaxspec.training.texts import read_samples


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """A fitted draft and how the fit went.

    Attributes:
      weights: the draft.
      coverage: share of the counted reply tokens inside its vocabulary.
      history: one dict a step with draft_loss and expected_acceptance_length.
    """

    weights: DraftWeights
    coverage: float
    history: tuple[dict[str, float], ...]


def warm_up(run: Run, policy_params: Any, progress: Progress) -> WarmUp:
    """Replies to training prompts with the policy, then fits a fresh or stored draft to them."""
    settings = run.experiment.draft.warm_up
    if settings is None:
        return initial_draft(run, policy_params, [])
    samples = policy_replies(run, policy_params, settings, progress)
    return fit(run, policy_params, samples, settings, progress)


def warm_up_to_folder(experiment: Experiment, out: str, texts: str = "") -> WarmUp:
    """Fits a draft and writes it as an EAGLE-3 folder.

    Args:
      experiment: the policy, the draft and how it is fitted.
      out: folder to write; must not exist, or be empty.
      texts: a JSONL of texts to fit to; the policy replies to training prompts when "".

    Raises:
      ValueError: if there is no draft or no warm-up in the settings, or the folder is in use.
    """
    settings = experiment.draft.warm_up
    if not experiment.draft.enabled or settings is None:
        raise ValueError("DraftConfig.enabled must be True and DraftConfig.warm_up set")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; name another folder")
    with Progress(settings.steps, title=f"{experiment.name}: warming up a draft") as progress:
        progress.phase("loading the policy")
        run, params = build(experiment)
        if run.experiment.policy.sft is not None:
            raise ValueError("PolicyConfig.sft is set: there is no stored policy to fit a draft to")
        if texts:
            samples = read_samples(run, texts)
        else:
            samples = policy_replies(run, params, settings, progress)
        fitted = fit(run, params, samples, settings, progress)
        weights = jax.tree.map(np.asarray, fitted.weights)
        write_eagle3(folder, run.draft.config, weights, run.model, dtype="float32")
    last = fitted.history[-1] if fitted.history else {}
    shown = ("draft_loss", "expected_acceptance_length", "top1_pass_1")
    rows = {name.replace("_", " "): f"{last[name]:.3f}" for name in shown if name in last}
    rows["vocabulary covers"] = f"{fitted.coverage:.1%} of reply tokens"
    rows["written to"] = str(folder)
    progress.summary(f"Fitted to {len(samples)} texts in {settings.steps} steps", rows)
    return fitted


def policy_replies(
    run: Run, policy_params: Any, settings: WarmUpConfig, progress: Progress
) -> list[Sample]:
    """Returns the policy's plain replies to training prompts."""
    task, seed = run.experiment.task, run.experiment.training.seed
    # Draws before the first: an order of their own.
    items = [task.train_prompt(-1 - i, seed) for i in range(settings.prompts)]
    prompts = [run.encode_prompt(item) for item in items]
    sampler = run.sampler(with_draft=False)
    each = settings.samples_per_prompt
    per_call = sampler.config.batch_size // each
    key = jax.random.fold_in(jax.random.key(seed), 2)
    samples: list[Sample] = []
    for start in range(0, len(prompts), per_call):
        part = prompts[start : start + per_call]
        result = sampler(
            policy_params, None, part, key, samples_per_prompt=each, first_row_id=start * each
        )
        for sample in reply_samples(part, result, each):
            samples.append(dataclasses.replace(sample, group=sample.group + start))
        progress.phase(
            "replying for the draft's warm-up", min(start + per_call, len(prompts)), len(prompts)
        )
    return samples


def initial_draft(run: Run, policy_params: Any, samples: Sequence[Sample]) -> WarmUp:
    """Returns the draft before any fit: stored, or fresh with a vocabulary counted from samples."""
    draft, settings = run.draft, run.experiment.draft
    if settings.source:
        _, weights = read_eagle3(settings.source, run.model)
        params = place_params(draft.param_table(), weights.params, run.mesh)
        buffers = place_params(draft.buffer_table(), weights.buffers, run.mesh)
        return WarmUp(DraftWeights(params=params, buffers=buffers), _coverage(buffers, samples), ())
    key = jax.random.fold_in(jax.random.key(run.experiment.training.seed), 3)
    ids, coverage = None, 1.0
    if draft.config.draft_vocab_size < run.model.vocab_size:
        if not samples:
            raise ValueError(
                f"DraftConfig.vocab_size={draft.config.draft_vocab_size} of "
                f"{run.model.vocab_size} needs counted replies; set DraftConfig.warm_up"
            )
        counts = np.zeros(run.model.vocab_size, np.int64)
        for sample in samples:
            np.add.at(counts, sample.reply, 1)
            np.add.at(counts, sample.prompt, 1)
        ids, _ = choose_vocabulary(counts, draft.config.draft_vocab_size, run.stop_ids)
        coverage = _coverage({"vocab_ids": ids}, samples)
    return WarmUp(draft.init(key, policy_params, ids, run.mesh), coverage, ())


def fit(
    run: Run,
    policy_params: Any,
    samples: Sequence[Sample],
    settings: WarmUpConfig,
    progress: Progress,
) -> WarmUp:
    """Fits the draft to samples; the policy's features are computed once and kept on the host.

    Raises:
      ValueError: if an update is not finite.
    """
    start = initial_draft(run, policy_params, samples)
    if not settings.steps:
        return start
    batches = _packed(run, samples, settings.rows_per_step)
    features_of = make_features(
        run.model,
        run.draft,
        run.mesh,
        compute_dtype=run.compute_dtype,
        chunk=run.experiment.step.logprob_chunk,
    )
    features = []
    for i, batch in enumerate(batches):
        rows = place_rows(batch, run.mesh)
        features.append(jax.tree.map(np.asarray, features_of(policy_params, rows)))
        progress.phase("computing features for the draft", i + 1, len(batches))
    optimizer = make_optimizer(settings.optimizer)
    table = run.draft.param_table()
    state = ModelState(
        params=start.weights.params,
        opt_state=init_optimizer(optimizer, start.weights.params, table, run.mesh),
    )
    step = make_distill_step(
        run.model, run.draft, optimizer, run.mesh, compute_dtype=run.compute_dtype
    )
    outer = {name: value for name, value in policy_params.items() if name != "layers"}
    order = np.random.default_rng(run.experiment.training.seed)
    history, queue = [], []
    for i in range(settings.steps):
        if not queue:
            queue = list(order.permutation(len(batches)))
        pick = queue.pop()
        state, metrics = step(
            state,
            start.weights.buffers,
            outer,
            place_rows(features[pick], run.mesh),
            place_rows(batches[pick], run.mesh),
        )
        values = {name: float(num) / max(float(den), 1e-9) for name, (num, den) in metrics.items()}
        if not all(np.isfinite(v) for v in values.values()):
            raise ValueError(
                f"warm-up update {i} of the draft is not finite; lower WarmUpConfig.optimizer's "
                f"learning_rate={settings.optimizer.learning_rate}"
            )
        history.append(values)
        progress.phase("warming up the draft", i + 1, settings.steps)
    weights = DraftWeights(params=state.params, buffers=start.weights.buffers)
    return WarmUp(weights, start.coverage, tuple(history))


def _packed(run: Run, samples: Sequence[Sample], rows_per_step: int) -> list[Any]:
    """Splits all rows into batches of one shape; the last one may end in empty rows."""
    packing = run.experiment.packing
    rows, _ = pack(
        samples,
        row_length=packing.row_length,
        num_ahead=run.num_ahead,
        share_prompts=packing.share_prompts,
        packed=packing.packed,
        rows_multiple=rows_per_step,
    )
    count = rows.tokens.shape[0] // rows_per_step
    return [
        jax.tree.map(lambda x: x[i * rows_per_step : (i + 1) * rows_per_step], rows)  # noqa: B023
        for i in range(count)
    ]


def _coverage(buffers: Any, samples: Sequence[Sample]) -> float:
    if "vocab_ids" not in buffers or not samples:
        return 1.0
    replies = np.concatenate([s.reply for s in samples])
    return float(np.isin(replies, np.asarray(buffers["vocab_ids"])).mean())
