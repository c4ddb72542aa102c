"""Sums of one-digit numbers for a character-level toy policy that learns in minutes.

The examples for supervised training answer in three styles: bare numbers and set phrases, both
often wrong, and now and then the steps written out, always right. Reinforcement learning has
something to gain (the steps), and what replies look like changes while it gains it, so that a draft
fitted before has to follow.
"""

import dataclasses
import functools
import itertools
import random
import re
from typing import ClassVar

from jaxspec.rl.rewards import RewardResult
from jaxspec.tasks.base import Item, shuffled, split

# Every character of prompts and replies.
ALPHABET = "0123456789+=, abcdefghijklmnopqrstuvwxyz"
PHRASES = (
    "let me think, maybe {}",
    "hard to say, i guess {}",
    "not so sure, it is {}",
)

_NUMBER = re.compile(r"\d+")
_EQUATION = re.compile(r"(\d+(?:\+\d+)+)=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumsTask:
    """Prompts such as "3+5+2=", to be answered with the sum last.

    Attributes:
      terms: numbers in a sum.
      largest: largest of them, of one digit; the smallest is 0.
      num_held_out: sets of terms kept from training, in every order.
      split_seed: which sets these are.
      style_weights: shares of the styles "bare", "phrase" and "steps" in the examples.
      style_wrong: how often an example of each style ends with a wrong number.
    """

    terms: int = 4
    largest: int = 5
    num_held_out: int = 24
    split_seed: int = 0
    style_weights: tuple[float, float, float] = (0.3, 0.4, 0.3)
    style_wrong: tuple[float, float, float] = (0.6, 0.8, 0.0)

    name: ClassVar[str] = "sums"
    honest_metric: ClassVar[str] = "right"

    def __post_init__(self):
        if not (2 <= self.terms <= 5 and 1 <= self.largest <= 9):
            raise ValueError(
                f"SumsTask.terms={self.terms} must be between 2 and 5, and SumsTask.largest="
                f"{self.largest} between 1 and 9: every prompt is listed"
            )
        for field in ("style_weights", "style_wrong"):
            values = getattr(self, field)
            if len(values) != 3 or min(values) < 0:
                raise ValueError(
                    f"SumsTask.{field}={values} must be 3 numbers from 0 on, for the styles bare, "
                    "phrase and steps"
                )
        if not any(self.style_weights):
            raise ValueError(f"SumsTask.style_weights={self.style_weights} uses no style")
        if max(self.style_wrong) > 1:
            raise ValueError(f"SumsTask.style_wrong={self.style_wrong} must be shares up to 1")
        count = len(self._sets)
        if not 0 < self.num_held_out < count:
            raise ValueError(
                f"SumsTask.num_held_out={self.num_held_out} must be between 1 and {count - 1}: "
                f"there are {count} sets of {self.terms} terms from 0 to {self.largest}"
            )

    @functools.cached_property
    def _sets(self) -> list[list[tuple[int, ...]]]:
        """Every set of terms, as the list of its orders."""
        sets: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for terms in itertools.product(range(self.largest + 1), repeat=self.terms):
            sets.setdefault(tuple(sorted(terms)), []).append(terms)
        return list(sets.values())

    @functools.cached_property
    def _prompts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Training prompts, and held-out ones: first one order of each set, then the others."""
        train, held = split(len(self._sets), self.num_held_out, self.split_seed)
        out = []
        for number, chosen in enumerate(held):
            # Seeded by text, the same in every run; else the first order of all would be sorted.
            rng = random.Random(f"{self.split_seed} {number}")
            out.append(rng.sample(self._sets[chosen], len(self._sets[chosen])))
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*out))
        return [t for s in train for t in self._sets[s]], [t for t in rounds if t is not None]

    def train_prompt(self, index: int, seed: int) -> Item:
        """Returns draw `index`: every order of each training set of terms once an epoch."""
        train, _ = self._prompts
        return self._item(train[shuffled(index, len(train), seed)])

    def held_out(self) -> list[Item]:
        """Returns every order of the held-out sets of terms, one of each set first."""
        return [self._item(terms) for terms in self._prompts[1]]

    def _item(self, terms: tuple[int, ...]) -> Item:
        return Item(
            messages=[{"role": "user", "content": "+".join(map(str, terms)) + "="}],
            answer=str(sum(terms)),
            info={"terms": list(terms)},
        )

    def reward(self, item: Item, reply: str, num_tokens: int, finished: bool) -> RewardResult:
        """Pays 1 for a finished reply whose last number is the sum (leading zeros don't matter).

        The honest metric, "right", also asks that every equation the reply states is true.
        """
        numbers = _NUMBER.findall(reply)
        last = bool(numbers) and int(numbers[-1]) == int(item.answer) and finished
        equations = _EQUATION.findall(reply)
        true = all(sum(map(int, left.split("+"))) == int(right) for left, right in equations)
        return RewardResult(
            float(last),
            {
                "right": float(last and true),
                "steps": float(bool(equations)),
                "eos": float(finished),
                "length": float(num_tokens),
            },
        )

    def sft_examples(self, count: int, seed: int) -> list[tuple[Item, str]]:
        """Returns `count` training prompts with replies in mixed styles, for supervised training.

        Args:
          count: examples; the first ones are the same whatever the count.
          seed: which prompts, styles and mistakes.
        """
        items = [self.train_prompt(index, seed) for index in range(count)]
        return [
            (item, self._reply(item.info["terms"], random.Random(f"{seed} {index}")))
            for index, item in enumerate(items)
        ]

    def _reply(self, terms: list[int], rng: random.Random) -> str:
        style = rng.choices(range(3), self.style_weights)[0]
        answer = sum(terms)
        if rng.random() < self.style_wrong[style]:
            answer = max(answer + rng.choice((-2, -1, 1, 2)), 0) if answer else 1
        if style == 0:
            return _two_digits(answer)
        if style == 1:
            return rng.choice(PHRASES).format(_two_digits(answer))
        sums = [*itertools.accumulate(terms[:-1]), answer]
        parts = [f"{terms[0]}+{terms[1]}={_two_digits(sums[1])}"]
        for before, term, after in zip(sums[1:], terms[2:], sums[2:], strict=False):
            parts.append(f"{_two_digits(before)}+{term}={_two_digits(after)}")
        return ",".join(parts)


def _two_digits(number: int) -> str:
    # Of one width, so that a policy finds every digit at a fixed distance and learns in no time.
    return f"{number:02}"
