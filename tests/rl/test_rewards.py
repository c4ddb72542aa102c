"""A reward that misbehaves costs its own sample, in time and in the result."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxspec.rl.rewards import Reply, RewardResult, score


def replies(*texts: str) -> list[Reply]:
    return [Reply(text, len(text) + 1, True) for text in texts]


def reward(item, text, num_tokens, finished):
    """Does what the text says."""
    if text == "raise":
        raise KeyError("gone")
    if text == "exit":
        sys.exit(3)
    if text == "hang":
        item.wait(30)
    if text == "nan":
        return RewardResult(float("nan"))
    if text == "bad metric":
        return RewardResult(1.0, {"right": float("inf")})
    if text == "number":
        return 1.0
    return RewardResult(num_tokens, {"right": text == "good", "length": num_tokens})


def test_every_fault_costs_only_its_sample():
    release = threading.Event()
    texts = ["good", "raise", "hang", "nan", "exit", "bad metric", "number", "hang", "longer"]
    start = time.monotonic()
    scores = score(reward, [release] * 9, replies(*texts), timeout_s=0.3, workers=2)
    elapsed = time.monotonic() - start
    release.set()
    assert elapsed < 5
    assert scores.valid.tolist() == [text in ("good", "longer") for text in texts]
    np.testing.assert_array_equal(scores.rewards, [5, 0, 0, 0, 0, 0, 0, 0, 7])
    assert scores.invalid == 7
    expected = ["KeyError: 'gone'", "took more than 0.3 s", "reward is nan", "SystemExit: 3"]
    expected += ["right is inf", "returned float, not RewardResult", "took more than 0.3 s"]
    assert list(scores.reasons.values()) == expected
    assert scores.mean("right") == 0.5 and scores.mean("reward") == 6.0
    assert np.isnan(scores.mean("unheard of"))


def test_more_hangs_than_workers_leave_the_rest_and_the_next_batch_alone():
    release = threading.Event()
    texts = ["hang"] * 3 + ["good"] * 4
    scores = score(reward, [release] * 7, replies(*texts), timeout_s=0.1, workers=1)
    assert scores.valid.tolist() == [False] * 3 + [True] * 4
    start = time.monotonic()
    assert score(reward, [release], replies("good"), timeout_s=5.0).valid.all()
    assert time.monotonic() - start < 3
    release.set()


def test_a_late_result_is_ignored():
    def late(item, text, num_tokens, finished):
        time.sleep(0.4 if text == "late" else 0.0)
        return RewardResult(1.0)

    scores = score(late, [None] * 3, replies("late", "a", "b"), timeout_s=0.1, workers=1)
    assert scores.rewards.tolist() == [0.0, 1.0, 1.0]
    time.sleep(0.5)
    assert scores.rewards.tolist() == [0.0, 1.0, 1.0]


def test_a_hung_reward_does_not_hold_the_interpreter():
    code = (
        "import time\n"
        "from jaxspec.rl.rewards import Reply, score\n"
        "def hang(*_): time.sleep(600)\n"
        "s = score(hang, [0], [Reply('x', 1, True)], timeout_s=0.1)\n"
        "print(s.reasons)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "took more than 0.1 s" in done.stdout


def test_order_is_that_of_the_replies_whatever_finishes_first():
    def slow_first(item, text, num_tokens, finished):
        time.sleep(0.05 * (item == 0))
        return RewardResult(float(item))

    scores = score(slow_first, list(range(20)), replies(*"a" * 20), workers=4)
    assert scores.rewards.tolist() == list(range(20))


def test_an_empty_batch_has_typed_arrays():
    scores = score(reward, [], [])
    assert scores.rewards.dtype == np.float64 and scores.valid.dtype == bool
    assert np.isnan(scores.mean("reward"))


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="2 items for 1 replies"):
        score(reward, [1, 2], replies("a"))
    with pytest.raises(ValueError, match="timeout_s=0.0 and workers=4"):
        score(reward, [1], replies("a"), timeout_s=0.0)
