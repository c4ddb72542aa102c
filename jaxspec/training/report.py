"""The report of a run: one page that needs no other file, its pictures, and rollouts as text."""

import functools
import importlib.resources
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes

from jaxspec.training import plots
from jaxspec.training.evidence import (
    Answer,
    Evaluation,
    ReportData,
    Rollout,
    Speed,
    answers,
    number,
    paired,
    signed,
    span,
    time_rows,
)
from jaxspec.training.metrics import mean_interval
from jaxspec.training.plots import Curve, Points

__all__ = [
    "Answer",
    "Evaluation",
    "ReportData",
    "Rollout",
    "Speed",
    "answers",
    "rollout_pieces",
    "rollout_text",
    "summary_picture",
    "write_report",
    "write_rollouts",
]

_WIDE, _NARROW = 7.6, 4.1


def rollout_pieces(
    tokens: Any, origin: Any, rejected: Any, length: int, decode: Callable[[list[int]], str]
) -> tuple[tuple[str, str], ...]:
    """Cuts a reply into pieces of text by where its tokens came from.

    Args:
      tokens: i32[N].
      origin: i8[N]; 1 drawn by the policy, 2 an accepted draft token.
      rejected: i32[N]; the draft token that was rejected at this place, or -1.
      length: how many tokens the reply has.
      decode: token ids to text.
    """
    ids = [int(t) for t in np.asarray(tokens)[:length]]
    spans: list[tuple[int, int, str]] = []
    for i in range(length):
        kind = "accepted" if origin[i] == 2 else "policy"
        if spans and spans[-1][2] == kind and rejected[i] < 0:
            spans[-1] = (spans[-1][0], i + 1, kind)
        else:
            spans.append((i, i + 1, kind))
    whole = decode(ids)
    pieces = []
    for start, end, kind in spans:
        if rejected[start] >= 0:
            pieces.append((decode([int(rejected[start])]), "rejected"))
        # Cut from the whole text: a span alone may begin or end within a character.
        pieces.append((whole[len(decode(ids[:start])) : len(decode(ids[:end]))], kind))
    return tuple(pieces)


def rollout_text(rollout: Rollout) -> str:
    """One rollout as plain text: [accepted draft tokens], {rejected ones}, the policy's own bare.

    Brackets, braces and backslashes of the text itself are escaped with a backslash.
    """
    marks = {"policy": ("", ""), "accepted": ("[", "]"), "rejected": ("{", "}")}
    reward = "" if rollout.reward is None else f"  reward {float(rollout.reward):.3g}"
    parts = []
    for text, origin in rollout.pieces:
        for mark in "\\[]{}":
            text = text.replace(mark, "\\" + mark)
        parts.append(text.join(marks[origin]))
    return f"=== step {rollout.step}{reward}\n{rollout.prompt}\n---\n{''.join(parts)}\n"


def write_rollouts(path: str | os.PathLike[str], rollouts: Sequence[Rollout]) -> None:
    """Writes rollouts as plain text (see `rollout_text`)."""
    head = "[accepted draft tokens]  {rejected draft token}  tokens drawn by the policy\n\n"
    Path(path).write_text(head + "\n".join(map(rollout_text, rollouts)), encoding="utf-8")


def summary_picture(data: ReportData, path: str | os.PathLike[str]) -> None:
    """Writes the three answers' pictures beside each other as a PNG of about 1500 x 450."""
    draws = _draws(data, columns=0)
    titles = {
        "reward": "Reward",
        "acceptance": "Acceptance of the drafts",
        "speed": "Rollout speed",
    }
    panels = [(titles[key], draws[key][0]) for key in titles if key in draws]
    figure = plots.panels_beside(panels or [("No measurements", Axes.set_axis_off)], (13.6, 4.1))
    Path(path).write_bytes(plots.png(figure, 110))


def write_report(folder: str | os.PathLike[str], data: ReportData) -> Path:
    """Writes `report.html`, its pictures as PNG, `summary.png` and `rollouts.txt`.

    Args:
      folder: made if there is none.
      data: what the report is made from.

    Returns:
      The path of the page. It is one file that needs no other.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for key in _draws(data):
        wide = _figure(data, key, _WIDE)
        (folder / f"{key}.png").write_bytes(plots.png(wide))
        pictures[key] = {
            "wide": plots.svg_data(wide),
            "narrow": plots.svg_data(_figure(data, key, _NARROW)),
        }
    summary_picture(data, folder / "summary.png")
    write_rollouts(folder / "rollouts.txt", data.samples)
    source = (
        importlib.resources.files("jaxspec.training").joinpath("report.html").read_text("utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(source).render(
        data=data,
        answers=answers(data),
        pictures=pictures,
        tables=_tables(data),
        versions={k: str(v) for k, v in data.versions.items()},
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


# Pictures.


def _figure(data: ReportData, key: str, width: float):
    draws = _draws(data, columns=3 if width == _WIDE else 1)[key]
    rows = len(data.speed) if key == "speed" else len(time_rows(data))
    heights = {"acceptance": 4.9, "speed": 1.3 + 0.7 * rows, "time": 1.4 + 0.5 * rows}
    ratio = 1.0 if key == "losses" else 2.2
    return plots.picture(draws, (width, heights.get(key, 3.5)), ratio)


def _draws(data: ReportData, columns: int = 3) -> dict[str, list[Callable[..., None]]]:
    """The panels of each picture that there are measurements for."""
    steps, out = data.steps, {}

    def curves(*names: tuple[str, str, str, str]) -> list[Curve]:
        found = [
            Curve(label=label, values=data.series(key), colour=colour, dash=dash)
            for key, label, colour, dash in names
        ]
        return [c for c in found if np.isfinite(c.values).any()]

    def bind(lines: list[Curve], **kwargs: Any) -> Callable[..., None]:
        kwargs.setdefault("columns", columns)
        return functools.partial(plots.draw_curves, steps=steps, curves=lines, **kwargs)

    lines = curves(
        ("reward", f"{data.reward_name}, training", plots.BLUE, "-"),
        ("honest", f"{data.honest_name}, training", plots.PURPLE, "--"),
    )
    if lines or data.evaluations:
        held_out = Points(
            label=f"{data.reward_name}, held-out prompts",
            steps=[e.step for e in data.evaluations],
            intervals=[mean_interval(e.reward) for e in data.evaluations],
            colour=plots.VERMILLION,
        )
        points = [held_out] if data.evaluations else []
        out["reward"] = [bind(lines, label="mean per reply", points=points)]
    lines = curves(
        ("expected_acceptance", "co-trained draft", plots.BLUE, "-"),
        ("expected_acceptance_frozen", "frozen draft", plots.VERMILLION, "--"),
    )
    if lines:
        out["acceptance"] = [bind(lines, label="tokens a verification")]
    if len(lines) == 2:
        gap = Curve(label="", values=lines[0].values - lines[1].values, colour=plots.GREEN)
        last = steps[data.ends("expected_acceptance", "expected_acceptance_frozen")[1]]
        shaded = [(float(last[0]), float(last[-1]))] if len(last) else []
        out["acceptance"].append(bind([gap], label="difference", zero=True, spans=shaded))
    if data.speed:
        ordered = sorted(data.speed, key=lambda s: s.batch_size)
        names = [f"batch {s.batch_size}" + ("\n(this run)" if s.own else "") for s in ordered]
        trials = [s.draft_rates / s.plain_rates for s in ordered]
        ratios = [s.ratio for s in ordered]
        out["speed"] = [
            functools.partial(plots.draw_ratios, names=names, intervals=ratios, trials=trials)
        ]
    if rows := time_rows(data):
        out["time"] = [functools.partial(plots.draw_times, rows=rows)]
    panels = [
        bind(line, label=line[0].label)
        for line in (
            curves(("policy_loss", "policy loss", plots.BLUE, "-")),
            curves(("draft_loss", "draft loss", plots.VERMILLION, "-")),
        )
        if line
    ]
    if panels:
        out["losses"] = panels
    return out


# Tables.


def _tables(data: ReportData) -> list[dict[str, Any]]:
    tables = []
    if data.evaluations:
        first, last = data.evaluations[0], data.evaluations[-1]
        rows = []
        for name, attribute in (
            (data.reward_name, "reward"),
            (data.honest_name, "honest"),
            ("greedy accuracy", "greedy"),
            ("reply length", "lengths"),
            ("acceptance, co-trained draft", "acceptance"),
            ("acceptance, frozen draft", "acceptance_frozen"),
        ):
            values = [getattr(e, attribute) for e in data.evaluations]
            if all(v is None for v in values):
                continue
            cells = ["" if v is None else number(np.mean(v)) for v in values]
            change = ""
            if len(values) > 1 and values[0] is not None and values[-1] is not None:
                scalar = np.size(values[0]) == 1
                plain = number(np.mean(values[-1]) - np.mean(values[0]), sign=True)
                change = plain if scalar else signed(paired(values[0], values[-1]))
            rows.append([name, *cells, change])
        heads = [
            "",
            *(f"step {e.step}" for e in data.evaluations),
            f"change, {first.step} to {last.step}",
        ]
        count = np.size(first.reward)
        tables.append({"title": f"Held-out prompts ({count})", "head": heads, "rows": rows})
    if data.speed:
        rows = [
            [
                str(s.batch_size),
                "" if s.num_draft_tokens is None else str(s.num_draft_tokens),
                f"{np.mean(s.draft_rates):,.0f}",
                f"{np.mean(s.plain_rates):,.0f}",
                f"{s.ratio.value:.2f}\N{MULTIPLICATION SIGN} ({span(s.ratio, 2)})",
                "" if s.acceptance_length is None else number(s.acceptance_length),
                str(s.ratio.count),
            ]
            for s in sorted(data.speed, key=lambda s: s.batch_size)
        ]
        head = [
            "batch size",
            "drafted",
            "tokens/s with draft",
            "without",
            "ratio",
            "acceptance length",
        ]
        tables.append({"title": "Rollout speed", "head": [*head, "pairs"], "rows": rows})
    keys = (
        ("reward", data.reward_name),
        ("honest", data.honest_name),
        ("acceptance_length", "acceptance length"),
        ("expected_acceptance", "expected, co-trained"),
        ("expected_acceptance_frozen", "expected, frozen"),
        ("policy_loss", "policy loss"),
        ("draft_loss", "draft loss"),
    )
    series = {name: data.series(key) for key, name in keys}
    series = {name: values for name, values in series.items() if np.isfinite(values).any()}
    if series:
        chosen = np.unique(np.linspace(0, len(data.records) - 1, 12).round().astype(int))
        rows = [
            [str(data.steps[i]), *(number(values[i]) for values in series.values())] for i in chosen
        ]
        title = "Steps" if len(chosen) == len(data.records) else "Some of the steps"
        tables.append({"title": title, "head": ["step", *series], "rows": rows})
    return tables
