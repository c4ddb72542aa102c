import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training import metrics as metrics_lib
from jaxspec.training.metrics import (
    MetricWriter,
    Ratio,
    change_interval,
    mean_interval,
    merge_ratios,
    ratio_interval,
    read_metrics,
    steps_interval,
)


def test_a_mean_over_devices_is_weighted_by_what_was_counted(tmp_path):
    parts = [{"acceptance": Ratio(3.0, 3.0)}, {"acceptance": Ratio(jnp.float32(0.0), 1)}]
    total = merge_ratios(parts)
    assert total["acceptance"].value == 0.75
    with MetricWriter(tmp_path) as writer:
        line = writer.write(0, total)
    assert line["acceptance"] == 0.75
    assert read_metrics(tmp_path)[0]["acceptance"] == 0.75
    mean_of_means = np.mean([p["acceptance"].value for p in parts])
    assert mean_of_means != total["acceptance"].value


def test_ratio_over_nothing_is_nan():
    assert math.isnan(Ratio().value)


def test_lines_are_json_and_name_what_is_not_finite(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(
            3,
            {
                "loss": float("nan"),
                "reward": jnp.float32(0.5),
                "phase": {"update": np.float64(2.0), "rollout": float("inf")},
                "lengths": np.arange(3),
                "note": "warm",
            },
        )
        # Flushed: readable while the run goes on.
        (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert line["step"] == 3 and line["time"] > 1e9
    assert line["loss"] is None and line["phase"] == {"update": 2.0, "rollout": None}
    assert line["non_finite"] == ["loss", "phase/rollout"]
    assert line["lengths"] == [0, 1, 2] and line["note"] == "warm"


def test_reserved_names_are_refused(tmp_path):
    with MetricWriter(tmp_path) as writer, pytest.raises(ValueError, match="time"):
        writer.write(0, {"time": 1.0})


def test_resume_removes_lines_at_and_beyond_the_resumed_step(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"reward": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # cut short by a kill
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    with MetricWriter(tmp_path, start_step=4) as writer:
        writer.write(4, {"reward": 40})
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert records[-1]["reward"] == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_the_old_lines_survive_a_kill_during_the_cut(tmp_path, monkeypatch):
    with MetricWriter(tmp_path) as writer:
        writer.write(0, {"reward": 1.0})
        writer.write(1, {"reward": 2.0})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics_lib.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricWriter(tmp_path, start_step=1)
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_metrics(tmp_path)


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        metrics_lib.SummaryWriter, "add_scalar", lambda self, *args: seen.append(args)
    )
    with MetricWriter(tmp_path) as writer:
        writer.write(2, {"reward": 1.5, "note": "x", "phase": {"update": 3.0}, "bad": math.nan})
    assert seen == [("reward", 1.5, 2), ("phase/update", 3.0, 2)]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_intervals_of_steps_are_honest_about_neighbours():
    rng = np.random.default_rng(0)
    missed = {"steps": 0, "as if independent": 0}
    for _ in range(200):
        x = np.zeros(60)
        for i, noise in enumerate(rng.normal(size=59), start=1):
            x[i] = 0.6 * x[i - 1] + noise
        for name, interval in (
            ("steps", steps_interval(x[20:])),
            ("as if independent", mean_interval(x[20:])),
        ):
            missed[name] += interval.above(0.0) or interval.below(0.0)
    # A 95% interval misses 10 of 200; the naive one several times more.
    assert missed["steps"] <= 26 and missed["as if independent"] >= 40, missed


def test_change_and_ratio_intervals():
    rng = np.random.default_rng(1)
    before, after = rng.normal(1.0, 0.1, 20), rng.normal(1.5, 0.1, 20)
    change = change_interval(before, [*after, math.nan])
    assert change.above(0.0) and abs(change.value - 0.5) < 0.1 and change.count == 40
    assert not change_interval(before, before[:3]).known
    # Slow and fast moments of the machine cancel in the pairs.
    load = rng.uniform(1.0, 10.0, 8)
    ratio = ratio_interval(1.5 * load, load)
    assert ratio.value == pytest.approx(1.5) and ratio.above(1.49)
    assert not ratio_interval([1.0], [2.0]).known
