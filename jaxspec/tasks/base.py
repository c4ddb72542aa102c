"""What a task is, and orders of its prompts that need no state."""

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np

from jaxspec.rl.rewards import RewardResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt with its verifiable answer.

    Attributes:
      messages: the conversation so far, as {"role", "content"}.
      answer: the right answer.
      info: whatever else the task's reward reads.
    """

    messages: list[dict[str, str]]
    answer: str
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class Task(Protocol):
    """Prompts to train on, others to be examined on, and a reward.

    Attributes:
      name: the task's name.
      honest_metric: which of the reward's metrics says whether replies are really right.
    """

    name: str
    honest_metric: str

    def train_prompt(self, index: int, seed: int) -> Item:
        """Returns draw `index` of an endless shuffled pass over the training prompts.

        Draws size * e to size * (e + 1) - 1 hold every prompt once, for any e; they depend on
        `index` and `seed` alone, so a run resumes by its step number.
        """

    def held_out(self) -> list[Item]:
        """Returns prompts that `train_prompt` never gives."""

    def reward(self, item: Item, reply: str, num_tokens: int, finished: bool) -> RewardResult:
        """Scores a reply of `num_tokens` tokens that ended by itself if `finished`."""


def shuffled(index: int, size: int, seed: int) -> int:
    """Returns which of `size` prompts draw `index` is, each once an epoch.

    Every epoch has its own order. It is defined by a hash of (seed, epoch, prompt), so that it is
    the same with every version of every library.

    Args:
      index: number of the draw; negative ones are epochs of their own.
      size: prompts in an epoch.
      seed: which shuffle.
    """
    if size < 1:
        raise ValueError(f"cannot draw from {size} prompts; hold fewer out or make more")
    epoch, position = divmod(index, size)
    return int(_permutation(size, seed, epoch)[position])


@functools.lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    state = _mixed(np.array([seed % 2**64], np.uint64))
    state = _mixed(state ^ np.uint64(epoch % 2**64))
    return np.argsort(_mixed(state ^ np.arange(size, dtype=np.uint64)), kind="stable")


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 16), after its increment."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def split(size: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits 0 .. size - 1 into training and held-out numbers, both in shuffled order.

    Raises:
      ValueError: nothing would be left to train on.
    """
    if not 0 <= held_out < size:
        raise ValueError(
            f"held_out={held_out} of {size} prompts leaves none to train on (or is negative)"
        )
    order = _permutation(size, seed, -1)
    return order[held_out:], order[:held_out]
