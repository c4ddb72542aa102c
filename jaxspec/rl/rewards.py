"""Rewards: plain functions of a prompt and a reply, run so that none can stop a training run."""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
from jaxtyping import Bool, Float64


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What a reward function returns.

    Attributes:
      reward: what the policy is trained to raise.
      metrics: honest measures beside it, by name; true and false are 1 and 0.
    """

    reward: SupportsFloat
    metrics: Mapping[str, SupportsFloat] = dataclasses.field(default_factory=dict)


# (item, text of the reply, generated tokens with the stop token, whether it ended by itself)
RewardFn = Callable[[Any, str, int, bool], RewardResult]


@dataclasses.dataclass(frozen=True)
class Reply:
    """One generated reply.

    Attributes:
      text: what was generated, without the stop token.
      num_tokens: generated tokens, the stop token counted.
      finished: whether it ended with a stop token rather than at the length limit.
    """

    text: str
    num_tokens: int
    finished: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of a batch of replies.

    Attributes:
      rewards: reward of each reply, 0 where invalid.
      valid: whether the reward function gave a finite reward in time.
      metrics: metrics of each reply, empty where invalid.
      reasons: why a reply is invalid, by its index.
    """

    rewards: Float64[np.ndarray, " reply"]
    valid: Bool[np.ndarray, " reply"]
    metrics: tuple[Mapping[str, float], ...]
    reasons: Mapping[int, str]

    @property
    def invalid(self) -> int:
        """Replies that have no reward."""
        return len(self.reasons)

    def mean(self, name: str) -> float:
        """Returns the mean of a metric, or of "reward", over the valid replies that have it."""
        if name == "reward":
            values = self.rewards[self.valid]
        else:
            values = np.array([m[name] for m in self.metrics if name in m])
        return float(values.mean()) if len(values) else float("nan")


def score(
    fn: RewardFn,
    items: Sequence[Any],
    replies: Sequence[Reply],
    *,
    timeout_s: float = 5.0,
    workers: int = 4,
) -> Scores:
    """Rewards every reply; one that fails, hangs or isn't finite costs itself and nothing else.

    Functions run in daemon threads. One that exceeds its time is abandoned: its thread is replaced
    at once, its late result ignored, and it keeps neither the next batch nor the interpreter's exit
    waiting. Python cannot stop it, though: it may use a core until it returns, and code that holds
    the interpreter's lock for long (a regular expression that backtracks without end) delays
    everything else meanwhile.

    Args:
      fn: the reward function; it must be safe to call from several threads.
      items: what each reply answers.
      replies: the replies.
      timeout_s: seconds one call may take.
      workers: calls in flight.

    Returns:
      Rewards in the order of the replies. Invalid ones are marked, with the reason.

    Raises:
      ValueError: the numbers of items and replies differ, or a setting is out of range.
    """
    if len(items) != len(replies):
        raise ValueError(f"{len(items)} items for {len(replies)} replies; give one item per reply")
    if timeout_s <= 0 or workers < 1:
        raise ValueError(f"timeout_s={timeout_s} and workers={workers} must be positive")
    run = _Run(fn, items, replies)
    outcomes = run.collect(timeout_s, min(workers, len(items)))
    good = {i: o for i, o in outcomes.items() if isinstance(o, RewardResult)}
    return Scores(
        rewards=np.array([good[i].reward if i in good else 0.0 for i in range(len(items))]),
        valid=np.array([i in good for i in range(len(items))], bool),
        metrics=tuple(good[i].metrics if i in good else {} for i in range(len(items))),
        reasons={i: o for i, o in sorted(outcomes.items()) if isinstance(o, str)},
    )


class _Run:
    """One batch in flight: threads take indices from `todo` until all have an outcome."""

    def __init__(self, fn: RewardFn, items: Sequence[Any], replies: Sequence[Reply]):
        self.fn, self.items, self.replies = fn, items, replies
        self.lock = threading.Lock()
        self.todo = collections.deque(range(len(items)))
        self.started: dict[int, float] = {}  # calls in flight: when each began
        self.outcomes: dict[int, RewardResult | str] = {}
        self.complete = threading.Event()

    def work(self) -> None:
        while True:
            with self.lock:
                if not self.todo:
                    return
                index = self.todo.popleft()
                self.started[index] = time.monotonic()
            outcome = self.call(index)
            with self.lock:
                # No longer in flight: given up, with another thread in this one's place.
                if self.started.pop(index, None) is None:
                    return
                self.settle(index, outcome)

    def call(self, index: int) -> RewardResult | str:
        reply = self.replies[index]
        try:
            result = self.fn(self.items[index], reply.text, reply.num_tokens, reply.finished)
            return _checked(result)
        except BaseException as error:  # noqa: BLE001 - SystemExit in a reward is the sample's too
            return f"{type(error).__name__}: {error}"

    def settle(self, index: int, outcome: RewardResult | str) -> None:
        self.outcomes[index] = outcome
        if len(self.outcomes) == len(self.items):
            self.complete.set()

    def collect(self, timeout_s: float, workers: int) -> dict[int, RewardResult | str]:
        if not self.items:
            return {}
        self.spawn(workers)
        while not self.complete.wait(self.until_first_timeout(timeout_s)):
            with self.lock:
                now = time.monotonic()
                late = [i for i, start in self.started.items() if now - start >= timeout_s]
                for index in late:
                    del self.started[index]
                    self.settle(index, f"took more than {timeout_s} s")
            self.spawn(len(late))
        return self.outcomes

    def until_first_timeout(self, timeout_s: float) -> float:
        with self.lock:
            oldest = min(self.started.values(), default=time.monotonic())
        return max(oldest + timeout_s - time.monotonic(), 0.001)

    def spawn(self, count: int) -> None:
        for _ in range(count):
            threading.Thread(target=self.work, name="reward", daemon=True).start()


def _checked(result: Any) -> RewardResult | str:
    if not isinstance(result, RewardResult):
        return f"returned {type(result).__name__}, not RewardResult"
    numbers = {"reward": result.reward, **result.metrics}
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    metrics = {name: float(value) for name, value in result.metrics.items()}
    return RewardResult(float(result.reward), metrics)
