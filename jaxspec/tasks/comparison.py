"""Which of two numbers is larger: a task on which a small chat model improves in minutes."""

import dataclasses
import functools
import re
from typing import ClassVar

from jaxspec.rl.rewards import RewardResult
from jaxspec.tasks.base import Item, shuffled, split

SYSTEM = "You are a careful math tutor. Explain in one sentence, then give the final number."
QUESTION = "Which number is larger, {} or {}?"

# A number, then within 30 characters that hold no other number and no full stop a comparative.
_CLAIM = re.compile(r"(\d+)([^\d.]{0,30}?)(?:larger|largest|greater|bigger|higher|more)")
_DENIAL = re.compile(r"\b(?:not|no|never|neither|isn't|cannot)\b|n't\b", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+")


def claimed_number(reply: str) -> str | None:
    """Returns the number that the reply says is the larger one, None if it says so of none.

    The first clause of the kind "N ... larger" counts, whatever follows it; denied ("N is not
    larger") it claims nothing.
    """
    match = _CLAIM.search(reply)
    if match is None or _DENIAL.search(match.group(2)):
        return None
    return match.group(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonTask:
    """Two different numbers; the reply must say which is larger in a sentence.

    Attributes:
      smallest: smallest number asked about.
      largest: largest number asked about.
      num_held_out: pairs kept from training, whichever number comes first.
      split_seed: which pairs these are.
      floor_tokens: replies up to this length earn nothing.
      full_tokens: replies from this length on earn all that they deserve.
    """

    smallest: int = 10
    largest: int = 99
    num_held_out: int = 144
    split_seed: int = 0
    floor_tokens: int = 8
    full_tokens: int = 24

    name: ClassVar[str] = "comparison"
    honest_metric: ClassVar[str] = "claim_correct"

    def __post_init__(self):
        if not 0 <= self.smallest < self.largest:
            raise ValueError(
                f"ComparisonTask.smallest={self.smallest} must be at least 0 and below "
                f"ComparisonTask.largest={self.largest}"
            )
        if not 0 <= self.floor_tokens < self.full_tokens:
            raise ValueError(
                f"ComparisonTask.floor_tokens={self.floor_tokens} must be at least 0 and below "
                f"ComparisonTask.full_tokens={self.full_tokens}"
            )
        if not 0 <= self.num_held_out < len(self._pairs):
            raise ValueError(
                f"ComparisonTask.num_held_out={self.num_held_out} must be below the number of "
                f"pairs, {len(self._pairs)}; lower it or widen smallest .. largest"
            )

    @functools.cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        numbers = range(self.smallest, self.largest + 1)
        return [(a, b) for a in numbers for b in numbers if a < b]

    def train_prompt(self, index: int, seed: int) -> Item:
        """Returns draw `index`: each training pair in both orders once an epoch."""
        train, _ = split(len(self._pairs), self.num_held_out, self.split_seed)
        draw = shuffled(index, 2 * len(train), seed)
        pair = self._pairs[train[draw // 2]]
        return self._item(*pair[:: 1 if draw % 2 else -1])

    def held_out(self) -> list[Item]:
        """Returns the held-out pairs once each, every second one with the larger number first."""
        _, held = split(len(self._pairs), self.num_held_out, self.split_seed)
        return [self._item(*self._pairs[p][:: 1 if i % 2 else -1]) for i, p in enumerate(held)]

    def _item(self, first: int, second: int) -> Item:
        return Item(
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": QUESTION.format(first, second)},
            ],
            answer=str(max(first, second)),
            info={"operands": [first, second]},
        )

    def reward(self, item: Item, reply: str, num_tokens: int, finished: bool) -> RewardResult:
        """Pays for the right claim, in a finished sentence of some length.

        max(claim, 0.3 * first number) * finished * ramp: the second term gives a start to a model
        that never makes the claim, and without the ramp replies shrink to the bare number. What
        follows the claim earns nothing and is not looked at.
        """
        claim = float(claimed_number(reply) == item.answer)
        numbers = _NUMBER.findall(reply.replace(",", ""))
        first = float(bool(numbers) and numbers[0] == item.answer)
        ramp = (num_tokens - self.floor_tokens) / (self.full_tokens - self.floor_tokens)
        return RewardResult(
            max(claim, 0.3 * first) * finished * min(max(ramp, 0.0), 1.0),
            {
                "claim_correct": claim,
                "first_right": first,
                "eos": float(finished),
                "length": float(num_tokens),
            },
        )
