import io
import sys

import numpy as np
import pytest

from jaxspec.training import console as console_lib
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.console import Progress, run_app


class Terminal(io.StringIO):
    def isatty(self):
        return True


VALUES = {
    "reward": 0.5,
    "acceptance_length": 2.25,
    "tokens_per_second": 1234.4,
    "policy_loss": 0.01,
    "draft_loss": float("nan"),
    "unknown": 1.0,
}


@pytest.fixture(autouse=True)
def term(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_plain_output_is_one_line_a_step_without_control_characters():
    stream = io.StringIO()
    with Progress(3, title="tiny \x1b[31mrun", stream=stream) as progress:
        progress.phase("loading")
        progress.phase("loading")
        for step in (1, 2, 3):
            progress.step(step, VALUES)
        progress.event("saved\ncheckpoint 3")
        progress.summary("Done", {"reward": "0.5"})
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[1] == "-- loading" and lines[5] == "-- saved checkpoint 3"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3 and len(lines) == 8
    assert steps[0].startswith(
        "step 1/3  reward 0.500  acceptance length 2.25  tokens/s 1,234  policy loss 0.0100  "
        "draft loss nan"
    )
    assert steps[0].endswith("left unknown") and steps[2].endswith("left 0 s")


def test_a_counted_phase_does_not_flood_a_log():
    stream = io.StringIO()
    with Progress(3, stream=stream) as progress:
        for done in range(1, 121):
            progress.phase("warming up draft", done, 120)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "-- warming up draft 1/120" and lines[-1] == "-- warming up draft 120/120"
    assert 10 <= len(lines) <= 12


def test_time_left_leaves_the_compiling_first_step_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console_lib.time, "monotonic", lambda: now[0])
    with Progress(12, start_step=2, stream=io.StringIO()) as progress:
        for step, seconds in ((3, 500.0), (4, 2.0)):
            now[0] += seconds
            progress.step(step, VALUES)
        assert progress.time_left() == "16 s"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_restored(error):
    stream = Terminal()
    streams = sys.stdout, sys.stderr
    try:
        with Progress(3, title="run [accepted]", stream=stream) as progress:
            progress.phase("compiling rollout")
            progress.step(1, VALUES)
            progress.event("wrote [1] {2}")
            if error is not None:
                raise error
            progress.summary("Done", {"reward": "0.5"})
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert type(raised) is error
    text = stream.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert (sys.stdout, sys.stderr) == streams
    for part in ("run [accepted]", "reward", "0.500", "1,234", "1/3 steps", "wrote [1] {2}"):
        assert part in text
    assert ("Done" in text) == (error is None)


def test_text_keeps_its_lines():
    for stream in (io.StringIO(), Terminal()):
        Progress(0, stream=stream).text("> [1]\n\x1b[2Jreply\n")
        assert stream.getvalue().splitlines() == ["> [1]", " [2Jreply", ""]


def test_a_mistake_is_told_in_a_line(capsys, tmp_path):
    def mistake():
        Checkpoints(tmp_path, keep_latest=0)

    def interrupted():
        raise KeyboardInterrupt

    assert run_app(lambda: None) == 0
    assert run_app(mistake) == 1
    assert capsys.readouterr().err.startswith("error: keep_latest=0; ")
    assert run_app(interrupted) == 130
    # An error of a library is not a user's mistake: its traceback is needed.
    with pytest.raises(ValueError, match="negative"):
        run_app(lambda: np.zeros(-1))
    with pytest.raises(SystemExit):
        run_app(sys.exit)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(1, stream=stream) as progress:
        progress.step(1, VALUES)
    assert "\x1b" not in stream.getvalue()
