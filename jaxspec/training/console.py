"""What a run says on the terminal: a live table there, one plain line a step anywhere else.

This is the only module of the package that prints.
"""

import collections
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import absl.logging
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Key in a step's values, heading of the table, name on a plain line, format.
COLUMNS = (
    ("reward", "reward", "reward", ".3f"),
    ("acceptance_length", "accepted", "acceptance length", ".2f"),
    ("tokens_per_second", "tokens/s", "tokens/s", ",.0f"),
    ("policy_loss", "policy loss", "policy loss", ".4f"),
    ("draft_loss", "draft loss", "draft loss", ".4f"),
)
_ROWS, _EVENTS, _RECENT = 8, 4, 10


class Progress:
    """Shows the progress of a run; a context manager that leaves the terminal as it found it.

    Args:
      total_steps: the step at which the run ends.
      start_step: the step it starts from (0, or the one it resumes from).
      title: a few words on the run.
      stream: where to write; standard output when None. A live table is drawn where it is a
        terminal, plain lines without control characters elsewhere.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        stream: Any = None,
    ):
        self._stream = sys.stdout if stream is None else stream
        self._total, self._step, self._title = total_steps, start_step, title
        self._phase, self._share = "", 0.0
        self._rows: collections.deque[tuple[int, dict[str, float]]] = collections.deque(
            maxlen=_ROWS
        )
        self._events: collections.deque[str] = collections.deque(maxlen=_EVENTS)
        self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._started = self._last = time.monotonic()
        self._timed = 0
        self._live: Live | None = None
        self._console: Console | None = None
        if _is_terminal(self._stream):
            self._console = Console(file=self._stream, force_terminal=True, highlight=False)

    def __enter__(self) -> "Progress":
        self._started = self._last = time.monotonic()
        if self._console is not None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=True,
                redirect_stderr=True,
            )
            self._live.start()
        elif self._title:
            self._line(self._title)
        return self

    def __exit__(self, *exc: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            # Restores the cursor and the standard streams, also after an error or Ctrl-C.
            live.stop()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Says what is happening before the first step or between steps.

        Args:
          text: such as "loading" or "warming up draft".
          done: how much of it is done, with `total`. A plain log gets about ten lines of it.
          total: how much there is.
        """
        counted = done is not None and total
        line = f"{text} {done}/{total}" if counted else text
        if self._live is None and line != self._phase:
            share = 10 * done // total / 10 if counted else 0.0
            fresh = not counted or not self._phase.startswith(f"{text} ")
            if fresh or share > self._share or done == total:
                self._line(f"-- {line}")
                self._share = share
        self._phase = line

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows a finished step.

        Args:
          step: how many steps are done now, up to `total_steps`.
          values: numbers under the keys of `COLUMNS`; others are not shown, missing ones are
            left blank.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._timed += 1
        # The first step compiles: it says nothing about the ones to come.
        if self._timed > 1:
            self._durations.append(seconds)
        self._step, self._phase = step, ""
        numbers = {k: float(values[k]) for k, *_ in COLUMNS if values.get(k) is not None}
        numbers["seconds"] = seconds
        self._rows.append((step, numbers))
        if self._live is None:
            parts = [f"step {step}/{self._total}"]
            parts += [f"{n} {_number(numbers[k], f)}" for k, _, n, f in COLUMNS if k in numbers]
            parts += [f"{seconds:.2f} s", f"left {self.time_left()}"]
            self._line("  ".join(parts))

    def event(self, text: str) -> None:
        """Shows something worth a line: an evaluation, a checkpoint, a warning."""
        if self._live is None:
            self._line(f"-- {text}")
        else:
            self._events.append(f"{_clock(time.monotonic() - self._started)}  {text}")

    def text(self, text: str) -> None:
        """Prints text of several lines, such as a reply, above the live table if there is one."""
        for line in text.split("\n"):
            if self._console is None:
                self._line(line)
            else:
                self._console.print(Text(_printable(line)))

    def time_left(self) -> str:
        """Returns the time to the last step at the pace of the latest ones, in words."""
        if not self._durations:
            return "unknown"
        return _duration(statistics.median(self._durations) * max(0, self._total - self._step))

    def summary(self, title: str, rows: Mapping[str, str]) -> None:
        """Ends the live table and prints what came out."""
        self.__exit__()
        if self._console is None:
            self._line(title)
            width = max((len(name) for name in rows), default=0)
            for name, value in rows.items():
                self._line(f"  {name:<{width}}  {value}")
            return
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(Text(title, style="bold"))
        self._console.print(table)

    def _line(self, text: str) -> None:
        print(_printable(text), file=self._stream, flush=True)

    def _render(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1))
        table.add_column("step", justify="right", style="bold")
        for _, heading, _, _ in COLUMNS:
            table.add_column(heading, justify="right")
        table.add_column("s/step", justify="right", style="dim")
        for step, numbers in self._rows:
            cells = [_number(numbers[k], f) if k in numbers else "" for k, _, _, f in COLUMNS]
            table.add_row(str(step), *cells, f"{numbers['seconds']:.2f}")
        elapsed = _duration(time.monotonic() - self._started)
        status = Text()
        status.append(f"{self._step}/{self._total} steps", style="bold")
        status.append(f"   {elapsed} so far   {self.time_left()} left", style="dim")
        if self._phase:
            status.append(f"\n{self._phase} ...", style="cyan")
        parts: list[RenderableType] = [Text(self._title, style="bold")] if self._title else []
        if self._rows:
            parts.append(table)
        parts.append(ProgressBar(total=max(1, self._total), completed=self._step, width=60))
        parts.append(status)
        parts += [Text(event, style="dim") for event in self._events]
        return Group(*parts)


def run_app(run: Callable[[], Any]) -> int:
    """Runs a program and tells a user's mistake in a line instead of a traceback.

    A ValueError or OSError that this package or the program itself raised explains itself; one
    from deeper down, like any other error, keeps its traceback.

    Returns:
      The exit code: 0, 1 after a mistake, 130 after Ctrl-C.
    """
    # The libraries' own progress notes would drown ours.
    absl.logging.set_verbosity(absl.logging.WARNING)
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        origin = frames[-1].f_globals.get("__name__", "")
        own = origin == "__main__" or origin.partition(".")[0] == __name__.partition(".")[0]
        # JAX takes its own frames out of a traceback and leaves a note that it did.
        if not own or getattr(error, "__notes__", None):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _is_terminal(stream: Any) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else str(value)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds // 60 % 60)} min"
