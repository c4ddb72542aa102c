"""Metrics of a run: ratios of global sums, their files, and how sure a mean over steps is."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special
from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A mean kept as its numerator and its denominator.

    Adding two ratios adds both parts, so that the mean over devices, microbatches or steps is
    the mean over what was counted, never a mean of means.

    Attributes:
      numerator: sum of the values.
      denominator: how many values (or how much weight) the sum is over.
    """

    numerator: Any = 0.0
    denominator: Any = 0.0

    def __post_init__(self):
        # Numbers may come as device scalars; sums over a run are kept in double precision.
        object.__setattr__(self, "numerator", float(self.numerator))
        object.__setattr__(self, "denominator", float(self.denominator))

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)

    @property
    def value(self) -> float:
        """The mean; nan over nothing."""
        return self.numerator / self.denominator if self.denominator else math.nan


def merge_ratios(parts: list[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Adds up, by name, the ratios of several devices, microbatches or steps."""
    total: dict[str, Ratio] = {}
    for part in parts:
        for name, ratio in part.items():
            total[name] = total.get(name, Ratio()) + ratio
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its 95% interval.

    Attributes:
      value: the estimate.
      low: lower end; nan where there was too little to tell.
      high: upper end; nan where there was too little to tell.
      count: how many values it rests on.
    """

    value: float
    low: float
    high: float
    count: int

    @property
    def known(self) -> bool:
        """Whether there was enough to give an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def above(self, value: float | int) -> bool:
        """Whether the whole interval lies above `value`."""
        return self.known and self.low > value

    def below(self, value: float | int) -> bool:
        """Whether the whole interval lies below `value`."""
        return self.known and self.high < value


def mean_interval(values: Any) -> Interval:
    """The mean of independent values with its Student interval; values not finite are left out."""
    x = _finite(values)
    if len(x) < 2:
        return _unknown(x)
    error = x.std(ddof=1) / math.sqrt(len(x))
    return _student(x.mean(), error, len(x) - 1.0, len(x))


def steps_interval(values: Any) -> Interval:
    """The mean of values of successive steps, which resemble their neighbours.

    The standard error comes from a circular block bootstrap (Politis and Romano, 1992) with
    blocks of about sqrt(n) steps; its quantile is Student's with one degree of freedom less than
    there are blocks, since few blocks tell little about their own spread.
    """
    x = _finite(values)
    if len(x) < _FEWEST_STEPS:
        return _unknown(x)
    error, freedom = _block_error(x)
    return _student(x.mean(), error, freedom, len(x))


def change_interval(before: Any, after: Any) -> Interval:
    """The mean of `after` minus that of `before`, both values of successive steps."""
    x, y = _finite(before), _finite(after)
    if min(len(x), len(y)) < _FEWEST_STEPS:
        missing = not len(x) or not len(y)
        value = math.nan if missing else float(y.mean() - x.mean())
        return Interval(value=value, low=math.nan, high=math.nan, count=len(x) + len(y))
    (error_x, freedom_x), (error_y, freedom_y) = _block_error(x), _block_error(y)
    error = math.hypot(error_x, error_y)
    return _student(y.mean() - x.mean(), error, min(freedom_x, freedom_y), len(x) + len(y))


def ratio_interval(numerators: Any, denominators: Any) -> Interval:
    """The ratio of paired positive measurements: Student's interval on its logarithm.

    Each pair is measured back to back, so what slows the machine for a while slows both and
    leaves their ratio. The value is the geometric mean of the ratios.
    """
    logs = np.log(np.asarray(numerators, float) / np.asarray(denominators, float))
    inner = mean_interval(logs)
    ends = (math.exp(v) for v in (inner.value, inner.low, inner.high))
    return Interval(**dict(zip(("value", "low", "high"), ends, strict=True)), count=inner.count)


_FEWEST_STEPS = 4


def _finite(values: Any) -> np.ndarray:
    x = np.asarray(values, float).reshape(-1)
    return x[np.isfinite(x)]


def _unknown(x: np.ndarray) -> Interval:
    value = float(x.mean()) if len(x) else math.nan
    return Interval(value=value, low=math.nan, high=math.nan, count=len(x))


def _student(value: Any, error: Any, freedom: float, count: int) -> Interval:
    reach = float(special.stdtrit(freedom, 0.975) * error)
    value = float(value)
    return Interval(value=value, low=value - reach, high=value + reach, count=count)


def _block_error(x: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    length = max(1, round(math.sqrt(len(x))))
    blocks = math.ceil(len(x) / length)
    starts = np.random.default_rng(0).integers(len(x), size=(resamples, blocks))
    rows = (starts[..., None] + np.arange(length)) % len(x)
    means = x[rows.reshape(resamples, -1)[:, : len(x)]].mean(1)
    # Blocks drawn from the sample spread too little, by the factor of any variance over n.
    return float(means.std() * math.sqrt(blocks / (blocks - 1))), blocks - 1.0


class MetricWriter:
    """Writes each step's metrics to `metrics.jsonl` and to TensorBoard.

    A line is an object with "step", "time" (seconds since 1970) and the metrics. A value that is
    not finite is null, and its name stands in the list "non_finite".

    Args:
      workdir: folder of the run; made if there is none.
      start_step: the first step that will be written. Lines of this step and beyond, left by a
        run that is being resumed from an earlier checkpoint, are removed, as is a torn last line.
    """

    def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0):
        self.path = Path(workdir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        resumed = self.path.exists()
        if resumed:
            _truncate(self.path, start_step)
        self._file = open(self.path, "a", encoding="utf-8")
        # TensorBoard drops what it holds beyond the purge step by itself.
        self._board = SummaryWriter(
            str(self.path.parent / "tensorboard"), purge_step=start_step if resumed else None
        )

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one step and flushes it.

        Args:
          step: the step, which also orders TensorBoard's curves.
          metrics: numbers, `Ratio`s, texts, or (nested) lists and dicts of numbers and texts.
            TensorBoard gets the numbers at the top level and one level down ("phase/update").

        Returns:
          The line as it was written.

        Raises:
          ValueError: if a metric is called "step", "time" or "non_finite".
        """
        reserved = {"step", "time", "non_finite"} & metrics.keys()
        if reserved:
            raise ValueError(f"the metric names {sorted(reserved)} are taken; rename them")
        bad: list[str] = []
        line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        for name, value in metrics.items():
            line[name] = _plain(value, name, bad)
        if bad:
            line["non_finite"] = bad
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name in ("step", "time", "non_finite"):
                continue
            parts = {name: value}
            if isinstance(value, dict):
                parts = {f"{name}/{key}": part for key, part in value.items()}
            for tag, number in parts.items():
                if isinstance(number, (int, float)):
                    self._board.add_scalar(tag, number, step)
        return line

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        self._board.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of `metrics.jsonl`; a torn last line is left out.

    Raises:
      ValueError: if a line before the last is not json; the file and the line are named.
    """
    path = Path(workdir) / FILE_NAME
    if not path.exists():
        return []
    return [record for record, _ in _lines(path)]


def _lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    texts = path.read_text(encoding="utf-8").split("\n")
    out = []
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        try:
            out.append((json.loads(text), text))
        except json.JSONDecodeError:
            # Without its newline the last line is one that a kill cut short.
            if number == len(texts):
                break
            raise ValueError(f"{path}, line {number} is not json: {text[:80]!r}") from None
    return out


def _truncate(path: Path, start_step: int) -> None:
    kept = [text for record, text in _lines(path) if record["step"] < start_step]
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as out:
        out.writelines(text + "\n" for text in kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def _plain(value: Any, name: str, bad: list[str]) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Ratio):
        value = value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{name}/{k}", bad) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{name}/{i}", bad) for i, v in enumerate(value)]
    if hasattr(value, "tolist"):
        plain = value.tolist()
        return _plain(plain, name, bad)
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    bad.append(name)
    return None
