"""Pictures of a run: drawn with matplotlib's object interface, so no global state is touched.

Colours are Okabe and Ito's, told apart by readers who see fewer of them; where two curves share
a picture they differ in dash too, so that it also reads in grey.
"""

import base64
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxspec.training.metrics import Interval

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#00795C", "#9A4C7F"
INK, GREY, RULE = "#1f2328", "#6a6f76", "#d8dade"
PHASE_COLOURS = ("#0072B2", "#E69F00", "#56B4E9", "#00795C", "#B8BCC2")
_WEB_FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.borderaxespad": 0.0,
    "legend.handlelength": 2.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxspec",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a picture over the steps: each step's value pale, a running mean bold.

    Attributes:
      label: its name in the legend.
      values: one value a step; nan where there is none.
      colour: of line and points.
      dash: matplotlib's line style of the running mean.
    """

    label: str
    values: np.ndarray
    colour: str
    dash: str = "-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points:
    """Measurements at a few steps, drawn as markers with their 95% intervals."""

    label: str
    steps: Sequence[int]
    intervals: Sequence[Interval]
    colour: str
    marker: str = "D"


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over up to `window` values (fewer at the ends); nan only where all are."""
    here = np.isfinite(values)
    kernel = np.ones(window)
    count = np.convolve(here, kernel, "same")
    total = np.convolve(np.where(here, values, 0.0), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), math.nan), where=count > 0)


def draw_curves(
    axes: Axes,
    steps: np.ndarray,
    curves: Sequence[Curve],
    *,
    label: str,
    points: Sequence[Points] = (),
    spans: Sequence[tuple[float, float]] = (),
    zero: bool = False,
    columns: int = 3,
) -> None:
    """Draws curves over steps, with measured points and shaded spans of steps.

    The legend stands above in so many columns, or inside for 0.
    """
    window = min(len(steps), 2 * (len(steps) // 30) + 1)
    for low, high in spans:
        axes.axvspan(low, high, color="#eef0f3", lw=0, zorder=0)
    if zero:
        axes.axhline(0.0, color=GREY, lw=1.0)
    for curve in curves:
        smooth = running_mean(curve.values, window)
        if window > 1:
            axes.plot(steps, curve.values, color=curve.colour, lw=0.8, alpha=0.3)
        axes.plot(steps, smooth, color=curve.colour, ls=curve.dash, lw=2.0, label=curve.label)
    for group in points:
        values = np.array([i.value for i in group.intervals])
        reach = np.array([(i.value - i.low, i.high - i.value) for i in group.intervals]).T
        axes.errorbar(
            group.steps,
            values,
            yerr=np.nan_to_num(reach),
            fmt=group.marker,
            color=group.colour,
            mec="white",
            ms=7,
            capsize=3,
            lw=1.4,
            label=group.label,
            zorder=5,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.02)
    if len(curves) + len(points) > 1:
        _legend(axes, columns)


def draw_ratios(
    axes: Axes, names: Sequence[str], intervals: Sequence[Interval], trials: Sequence[np.ndarray]
) -> None:
    """Draws speed ratios with their intervals and each pair's own ratio; 1 is no difference."""
    rows = np.arange(len(names))[::-1]
    for row, interval, ratios in zip(rows, intervals, trials, strict=True):
        offsets = row - 0.2 - 0.02 * (np.arange(len(ratios)) % 5)
        axes.plot(ratios, offsets, "o", color=BLUE, alpha=0.35, ms=4, mew=0)
        reach = np.nan_to_num([[interval.value - interval.low], [interval.high - interval.value]])
        axes.errorbar(
            interval.value, row, xerr=reach, fmt="D", color=BLUE, mec="white", ms=8, capsize=4, lw=2
        )
        axes.annotate(
            f"{interval.value:.2f}\N{MULTIPLICATION SIGN}",
            (interval.value, row),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
        )
    axes.axvline(1.0, color=INK, lw=1.2, ls="--")
    axes.set_yticks(rows, names)
    axes.set_ylim(-0.6, len(names) - 0.35)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.9), max(high, 1.1))
    axes.set_xlabel("speed with the draft / without it (1 = the same)")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(False, axis="y")


def draw_times(axes: Axes, rows: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Draws where the seconds of a step go, one stacked bar a row."""
    phases = list(dict.fromkeys(itertools.chain.from_iterable(row for _, row in rows)))
    longest = max(sum(row.values()) for _, row in rows) or 1.0
    left = np.zeros(len(rows))
    heights = np.arange(len(rows))[::-1]
    colours = itertools.cycle(PHASE_COLOURS)
    for phase, colour in zip(phases, colours, strict=False):
        widths = np.array([row.get(phase, 0.0) for _, row in rows])
        axes.barh(heights, widths, 0.62, left, color=colour, ec="white", lw=1.0, label=phase)
        for height, start, width in zip(heights, left, widths, strict=True):
            if width > 0.08 * longest:
                dark = colour in ("#0072B2", "#00795C")
                axes.text(
                    start + width / 2,
                    height,
                    f"{width:.2g} s",
                    ha="center",
                    va="center",
                    color="white" if dark else INK,
                )
        left += widths
    axes.set_yticks(heights, [name for name, _ in rows])
    axes.set_xlabel("seconds a step (median)")
    axes.grid(False, axis="y")
    _legend(axes, len(phases) if axes.get_figure().get_figwidth() > 6 else 3)


def picture(
    draws: Sequence[Callable[..., None]], size: tuple[float, float], ratio: float = 1.0
) -> Figure:
    """Makes a figure of panels below each other that share the steps.

    Args:
      draws: each draws on the axes that it is given.
      size: width and height in inches.
      ratio: height of the first panel over that of each other one.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        ratios = [ratio] + [1.0] * (len(draws) - 1)
        panels = figure.subplots(len(draws), 1, sharex=True, squeeze=False, height_ratios=ratios)
        for axes, draw in zip(panels[:, 0], draws, strict=True):
            draw(axes)
        for axes in panels[:-1, 0]:
            axes.set_xlabel("")
    return figure


def panels_beside(
    draws: Sequence[tuple[str, Callable[..., None]]], size: tuple[float, float]
) -> Figure:
    """Makes a figure of titled panels beside each other."""
    with matplotlib.rc_context({**_STYLE, "font.size": 9.0}):
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        row = figure.subplots(1, len(draws), squeeze=False)[0]
        for axes, (title, draw) in zip(row, draws, strict=True):
            draw(axes)
            axes.set_title(title, loc="left", fontweight="bold", fontsize=10.5, pad=10)
    return figure


def png(figure: Figure, dots_per_inch: int = 160) -> bytes:
    """Renders a figure as PNG, the same bytes each time."""
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        metadata = {"Software": None}
        figure.savefig(out, format="png", dpi=dots_per_inch, facecolor="white", metadata=metadata)
    return out.getvalue()


def svg_data(figure: Figure) -> str:
    """Renders a figure as an SVG data address in the reader's own fonts."""
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    text = out.getvalue().decode().replace("'DejaVu Sans', sans-serif", _WEB_FONTS)
    text = text.replace("'DejaVu Sans'", _WEB_FONTS)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def _legend(axes: Axes, columns: int) -> None:
    """Puts the legend above the axes in so many columns; inside, where there is room, for 0."""
    if columns:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.03), ncols=columns, columnspacing=1.6)
    else:
        axes.legend(loc="best", borderaxespad=0.6, fontsize="small")
