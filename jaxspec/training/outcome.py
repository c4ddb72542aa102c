"""What a run leaves behind: exports, versions and the report."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.training import environment
from jaxspec.training.console import Progress
from jaxspec.training.evidence import Evaluation, ReportData, Rollout, Speed, answers
from jaxspec.training.export import DRAFT_FOLDER, POLICY_FOLDER, export
from jaxspec.training.report import rollout_pieces, write_report

SHOWN_REPLIES = 12


def report_data(result: Any, operative_config: str, seconds: float) -> ReportData:
    """Gathers a run's measurements in the report's terms."""
    run, experiment = result.run, result.run.experiment
    honest = getattr(experiment.task, "honest_metric", "")
    records = [
        record
        | {
            "honest": record.get(honest),
            "expected_acceptance": record.get("expected_acceptance_length"),
            "expected_acceptance_frozen": record.get("frozen_expected_acceptance_length"),
        }
        for record in result.records
    ]
    by_step: dict[int, dict[str, Any]] = {}
    for record in result.evaluations:
        entry = by_step.setdefault(record["step"], {})
        if record["name"].endswith("frozen draft"):
            entry["acceptance_frozen"] = record.get("acceptance_length")
        else:
            entry["main"] = record
    evaluations = [
        Evaluation(
            step=step,
            reward=_array(entry["main"], "reward"),
            honest=_array(entry["main"], honest),
            lengths=_array(entry["main"], "reply_length"),
            acceptance=entry["main"].get("acceptance_length"),
            # Before the first step the two drafts are one and the same.
            acceptance_frozen=entry.get("acceptance_frozen")
            or (entry["main"].get("acceptance_length") if step == 0 else None),
        )
        for step, entry in sorted(by_step.items())
    ]
    speed = [
        Speed(
            batch_size=record["batch_size"],
            draft_seconds=[t["seconds"] for t in record["draft"]],
            draft_tokens=[t["tokens"] for t in record["draft"]],
            plain_seconds=[t["seconds"] for t in record["plain"]],
            plain_tokens=[t["tokens"] for t in record["plain"]],
            acceptance_length=record.get("acceptance_length"),
            num_draft_tokens=record["num_draft_tokens"],
            own=record["batch_size"] == experiment.rollout.batch_size,
        )
        for record in result.speed
    ]
    steps = int(result.state.step)
    minutes = seconds / 60
    ended = ", ended early" if result.interrupted else ""
    summary = f"{steps} of {experiment.training.steps} steps in {minutes:.1f} minutes{ended}."
    return ReportData(
        title=experiment.name,
        summary=summary,
        config_text=operative_config,
        versions=environment.versions() | {"compute dtype": run.compute_dtype},
        records=records,
        evaluations=evaluations,
        speed=speed,
        samples=_shown(result),
        honest_name=honest.replace("_", " ") or "honest metric",
    )


def write_outcome(
    result: Any, operative_config: str, progress: Progress, seconds: float
) -> ReportData:
    """Writes exports, versions and the report to the run's folder and sums up on the terminal."""
    data = report_data(result, operative_config, seconds)
    folder: Path | None = result.workdir
    if folder is not None:
        progress.phase("writing exports and the report")
        (folder / "versions.json").write_text(json.dumps(dict(data.versions), indent=1))
        (folder / "evaluations.json").write_text(
            json.dumps({"evaluations": result.evaluations, "speed": result.speed}, indent=1)
        )
        # Both follow from the newest checkpoint, so that a resumed run may write them again.
        for name in (POLICY_FOLDER, DRAFT_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        export(result.run, folder, result.state.policy.params, result.state.draft_weights)
        write_report(folder, data)
    rows = {answer.question: f"{answer.verdict}. {answer.sentence}" for answer in answers(data)}
    if folder is not None:
        rows["report"] = str(folder / "report.html")
    progress.summary(f"{data.title}: {data.summary}", rows)
    return data


def _array(record: dict[str, Any], name: str) -> Any:
    values = record["per_prompt"].get(name)
    return None if values is None else np.asarray(values, np.float64)


def _shown(result: Any) -> list[Rollout]:
    replies = result.samples
    if replies is None:
        return []
    run, rolled = result.run, replies.result
    rewards = replies.metric("reward")
    shown = []
    for i in range(min(SHOWN_REPLIES, len(replies.texts))):
        pieces = rollout_pieces(
            rolled.tokens[i],
            rolled.origin[i],
            rolled.rejected[i],
            int(rolled.lengths[i]),
            run.tokenizer.decode,
        )
        each = len(replies.items) // len(replies.prompts)
        prompt = run.tokenizer.decode(replies.prompts[i // each].tolist())
        reward = None if np.isnan(rewards[i]) else float(rewards[i])
        shown.append(
            Rollout(step=int(result.state.step), prompt=prompt, pieces=pieces, reward=reward)
        )
    return shown
