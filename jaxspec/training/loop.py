"""The training loop: warm up, co-train, evaluate, export, report; resumable at every step."""

import contextlib
import dataclasses
import json
import math
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config import Experiment
from jaxspec.drafts.base import DraftWeights
from jaxspec.gin_config import to_dict
from jaxspec.params import abstract_params
from jaxspec.rl.state import CoTrainState, abstract_state, init_state
from jaxspec.rl.step import add_metrics
from jaxspec.training.checkpoint import Checkpoints, check_workdir
from jaxspec.training.collect import StepData, collect
from jaxspec.training.console import Progress
from jaxspec.training.evaluate import evaluate, measure_speed
from jaxspec.training.metrics import MetricWriter
from jaxspec.training.setup import Run, build
from jaxspec.training.sft import supervised
from jaxspec.training.warm_up import warm_up


@dataclasses.dataclass
class TrainResult:
    """What a run leaves in memory.

    Attributes:
      run: the programs and settings.
      state: policy, draft and optimisers after the last step.
      frozen: the draft as it was after its warm-up.
      reference: the policy as it was before RL, where the loss holds to it; else None.
      records: one dict a step, as in metrics.jsonl.
      evaluations: held-out evaluations in order.
      speed: timed rollouts with and without the draft.
      samples: replies of the last evaluation for the report.
      interrupted: whether a signal or the time limit ended the run early.
      workdir: where everything was written, or None.
    """

    run: Run
    state: CoTrainState | None
    frozen: DraftWeights | None
    reference: Any
    records: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    samples: Any
    interrupted: bool
    workdir: Path | None


class _Stop:
    """Turns SIGTERM and Ctrl-C into a request to end after the running step."""

    def __init__(self):
        self.requested = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator["_Stop"]:
        """Installs the handlers; a second signal ends the program at once."""

        def handle(number: int, _: Any) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = signal.Signals(number).name

        try:
            before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            # Not the main thread: a notebook server decides about signals itself.
            yield self
            return
        try:
            yield self
        finally:
            for number, old in before.items():
                signal.signal(number, old)


def fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Returns the settings that two runs must share for one to go on where the other stopped.

    Devices, the number of steps, limits, evaluation and what is kept may change on the way.
    """
    settings = to_dict(experiment)
    for name in ("mesh", "evaluation", "checkpoint"):
        del settings[name]
    for name in ("steps", "max_minutes", "max_nonfinite_in_a_row"):
        del settings["training"][name]
    return settings


def train(
    experiment: Experiment,
    workdir: str | Path | None = None,
    *,
    resume: bool = True,
    operative_config: str = "",
    stream: Any = None,
) -> TrainResult:
    """Runs an experiment.

    Args:
      experiment: every setting.
      workdir: folder for checkpoints, metrics and the report; None keeps everything in memory.
      resume: whether a folder that holds this experiment is continued.
      operative_config: the configuration as text, saved with the run.
      stream: where progress is shown; standard output when None.

    Returns:
      The trained state and everything measured.

    Raises:
      ValueError: for settings that do not fit, a folder of another experiment, or too many
        non-finite updates in a row (the batch is saved).
      OSError: if the disk is full; earlier checkpoints are kept.
    """
    started = time.monotonic()
    folder = None if workdir is None else Path(workdir)
    if folder is not None:
        check_workdir(folder, fingerprint(experiment), resume)
        if operative_config:
            (folder / "operative_config.gin").write_text(operative_config)
    progress = Progress(experiment.training.steps, title=experiment.name, stream=stream)
    stop = _Stop()
    with stop.listening(), progress:
        progress.phase("loading the policy")
        run, policy_params = build(experiment)
        with contextlib.ExitStack() as stack:
            checkpoints = None
            if folder is not None:
                kept = experiment.checkpoint
                checkpoints = stack.enter_context(
                    Checkpoints(folder / "checkpoints", kept.keep_latest, kept.keep_best, "reward")
                )
            result = _start(run, policy_params, checkpoints, folder, progress)
            del policy_params
            first = int(result.state.step)
            writer = None
            if folder is not None:
                writer = stack.enter_context(MetricWriter(folder, first + 1))
            _co_train(result, checkpoints, writer, progress, stop, started)
            _finish(result, progress, stop)
        from jaxspec.training.outcome import write_outcome

        write_outcome(result, operative_config, progress, time.monotonic() - started)
    return result


def _start(run: Run, policy_params: Any, checkpoints, folder, progress) -> TrainResult:
    """Restores the newest checkpoint, or trains up to the point where RL begins."""
    steps = [] if checkpoints is None else checkpoints.steps()
    result = TrainResult(
        run=run,
        state=None,
        frozen=None,
        reference=None,
        records=[],
        evaluations=[],
        speed=[],
        samples=None,
        interrupted=False,
        workdir=folder,
    )
    if steps:
        tree, extra = checkpoints.restore(None, _abstract(run))
        result.state, result.frozen = tree["state"], tree["frozen"]
        result.reference = tree["reference"]
        result.evaluations, result.records = extra["evaluations"], extra["records"]
        progress.event(f"resuming after step {int(result.state.step)}")
        return result
    experiment = run.experiment
    if experiment.policy.sft is not None:
        policy_params = supervised(run, policy_params, progress)
    frozen = None
    if run.draft is not None:
        fitted = warm_up(run, policy_params, progress)
        frozen = _copy(fitted.weights, _abstract(run)["frozen"])
        progress.event(f"draft vocabulary covers {fitted.coverage:.1%} of reply tokens")
    result.state = init_state(
        jax.random.key(experiment.training.seed),
        policy_params,
        run.policy_table,
        run.policy_optimizer,
        run.mesh,
        draft_weights=fitted.weights if frozen is not None else None,
        draft_table=run.draft.param_table() if run.draft else None,
        draft_optimizer=run.draft_optimizer,
    )
    result.frozen = frozen
    if experiment.step.loss.kl_coefficient > 0:
        result.reference = _copy(policy_params, _abstract(run)["reference"])
    progress.phase("evaluating the untrained policy")
    record, result.samples = evaluate(run, policy_params, frozen, "before training")
    if record:
        result.evaluations.append(record | {"step": 0})
    return result


def _copy(tree: Any, described: Any) -> Any:
    """Copies arrays that a donated state would take along, and lays them as described."""
    return jax.tree.map(
        lambda x, leaf: jax.device_put(jnp.array(x, copy=True), leaf.sharding), tree, described
    )


def _abstract(run: Run) -> dict[str, Any]:
    """Shapes and shardings of what a checkpoint holds."""
    draft = run.draft
    state = abstract_state(
        run.policy_table,
        run.policy_optimizer,
        run.mesh,
        draft_table=draft.param_table() if draft else None,
        draft_buffer_table=draft.buffer_table() if draft else None,
        draft_optimizer=run.draft_optimizer,
    )
    frozen = None
    if draft is not None:
        frozen = DraftWeights(
            params=abstract_params(draft.param_table(), run.mesh),
            buffers=abstract_params(draft.buffer_table(), run.mesh),
        )
    reference = None
    if run.experiment.step.loss.kl_coefficient > 0:
        reference = abstract_params(run.policy_table, run.mesh)
    return {"state": state, "frozen": frozen, "reference": reference}


def _co_train(result: TrainResult, checkpoints, writer, progress, stop, started) -> None:
    """Takes steps until the last one, a signal or the time limit."""
    run, training = result.run, result.run.experiment.training
    checkpoint, evaluation = run.experiment.checkpoint, run.experiment.evaluation
    saved = int(result.state.step)
    durations: list[float] = []
    while int(result.state.step) < training.steps:
        begun = time.monotonic()
        step = int(result.state.step)
        data, metrics, update_seconds = _one_step(result, step)
        record = _record(data, metrics, update_seconds, time.monotonic() - begun)
        durations.append(time.monotonic() - begun)
        done = step + 1
        if writer is not None:
            record = writer.write(done, record)
        result.records.append({"step": done} | record)
        progress.step(done, record)
        if not data.updates:
            progress.event(f"step {done}: every group's rewards were equal; no update")
        _check_finite(result, data, training.max_nonfinite_in_a_row)
        if evaluation.every and done % evaluation.every == 0 and done < training.steps:
            named, _ = evaluate(
                run, result.state.policy.params, result.state.draft_weights, f"step {done}"
            )
            if named:
                result.evaluations.append(named | {"step": done})
        late = training.max_minutes and _out_of_time(result, started, durations)
        ends = done == training.steps or bool(stop.requested) or bool(late)
        if checkpoints is not None and (done % checkpoint.every == 0 or ends):
            _save(checkpoints, result, done)
            saved = done
        if ends:
            break
    if int(result.state.step) < training.steps:
        result.interrupted = True
        why = f"on {stop.requested}" if stop.requested else "to keep TrainingConfig.max_minutes"
        where = "" if checkpoints is None else f"; saved, the same command goes on from {saved}"
        progress.event(f"stopping after step {int(result.state.step)} {why}{where}")


def _one_step(result: TrainResult, step: int):
    run, state = result.run, result.state
    data = collect(run, state.policy.params, state.draft_weights, step, state.key)
    every = run.experiment.draft.update_every
    update_draft = bool(every) and step % every == 0
    begun = time.perf_counter()
    metrics: dict[str, Any] = {}
    for update in data.updates:
        result.state, more = run.rl_step(
            result.state,
            update.batch.batch,
            jnp.asarray(update.batch.used, jnp.int32),
            jnp.float32(update.denominator),
            frozen_draft=result.frozen,
            reference_params=result.reference,
            update_draft=update_draft,
        )
        metrics = add_metrics(metrics, more) if metrics else more
    metrics = jax.tree.map(float, jax.device_get(metrics))
    if len(data.updates) != 1:
        # A step of the run is one rollout, however many updates it led to.
        whole = NamedSharding(run.mesh, PartitionSpec())
        counted = jax.device_put(jnp.asarray(step + 1, jnp.int32), whole)
        result.state = result.state.replace(step=counted)
    return data, metrics, time.perf_counter() - begun


def _record(
    data: StepData, metrics: dict[str, Any], update_seconds: float, total: float
) -> dict[str, Any]:
    """Joins what the rollout and the update say; every ratio is global over global."""
    record = dict(data.record)
    for name, (numerator, denominator) in metrics.items():
        record[name] = numerator / denominator if denominator else float("nan")
    seconds = dict(record.pop("seconds")) | {"update": update_seconds}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return record | {"seconds": seconds}


def _check_finite(result: TrainResult, data: StepData, limit: int) -> None:
    """Stops a run whose updates keep being skipped, with the batch saved.

    Raises:
      ValueError: naming how many in a row and where the batch lies.
    """
    skipped = int(result.state.nonfinite_in_a_row)
    if skipped < limit:
        return
    where = "nowhere (the run has no workdir)"
    if result.workdir is not None:
        where = result.workdir / f"nonfinite_batch_{int(result.state.step):08d}.pkl"
        batch = jax.tree.map(np.asarray, data.updates[-1].batch.batch)
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        where.write_bytes(pickle.dumps(fields))
    raise ValueError(
        f"{skipped} updates in a row had a loss or gradient that is not finite "
        f"(TrainingConfig.max_nonfinite_in_a_row={limit}); the last batch is saved: {where}. "
        "Lower OptimizerConfig.learning_rate"
    )


def _out_of_time(result: TrainResult, started: float, durations: list[float]) -> bool:
    """Whether another step, the last evaluations, exports and the report would be too late."""
    experiment = result.run.experiment
    settings, batch = experiment.evaluation, experiment.rollout.batch_size
    usual = float(np.median(durations[-8:]))
    rollout = float(np.median([r["seconds"]["rollout"] for r in result.records[-8:]]))
    # Exports and the report; then both drafts' evaluations, and the speed trials with what they
    # compile.
    reserve = 20.0 + 2 * math.ceil(settings.prompts / batch) * rollout
    if settings.speed_trials:
        for size in settings.speed_batch_sizes:
            share = min(1.0, max(0.2, size / batch))
            reserve += 25 + 1.5 * (settings.trials_at(size, batch) + 1) * share * rollout
    late = time.monotonic() - started + usual + reserve
    return late > 60 * experiment.training.max_minutes


def _save(checkpoints: Checkpoints, result: TrainResult, step: int) -> None:
    extra = {"evaluations": result.evaluations, "records": result.records}
    extra = json.loads(json.dumps(extra))
    reward = result.records[-1]["reward"] if result.records else float("nan")
    reward = float("nan") if reward is None else reward
    checkpoints.save(
        step,
        {"state": result.state, "frozen": result.frozen, "reference": result.reference},
        extra,
        {"reward": reward},
    )


def _finish(result: TrainResult, progress: Progress, stop: _Stop) -> None:
    """Evaluates what was trained and measures the rollouts' speed."""
    run = result.run
    if stop.requested:
        return
    policy_params, draft = result.state.policy.params, result.state.draft_weights
    progress.phase("evaluating the trained policy")
    record, samples = evaluate(run, policy_params, draft, "after training")
    if record:
        result.samples = samples
        result.evaluations.append(record | {"step": int(result.state.step)})
    if draft is not None and record:
        progress.phase("evaluating the frozen draft")
        frozen, _ = evaluate(run, policy_params, result.frozen, "after training, frozen draft")
        result.evaluations.append(frozen | {"step": int(result.state.step)})
    if draft is not None and run.experiment.evaluation.speed_trials:
        result.speed = measure_speed(run, policy_params, draft, progress)
