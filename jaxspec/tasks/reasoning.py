"""Datasets of reasoning-gym by name, rewarded by their own scorers."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxspec.rl.rewards import RewardResult
from jaxspec.tasks.base import Item, shuffled, split

ANSWERS = ("tag", "last_number", "last_line", "whole")

SYSTEM = "Solve the problem. Finish with the final answer between <answer> and </answer>."

# Calls that run, or may run, text as a program (SymPy's parsers evaluate what they parse).
_UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "sympify",
    "parse_expr",
    "parse_latex",
    "S",
    "loads",
    "run",
    "Popen",
    "system",
}
_SAFE_MODULES = {"json", "math", "re", "ast"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningTask:
    """One dataset of reasoning-gym.

    Attributes:
      dataset: its name, such as "chain_sum".
      settings: settings of the dataset's own configuration.
      size: prompts generated, before repeated questions are dropped.
      num_held_out: of the distinct questions, how many are kept from training.
      seed: which prompts, and which of them are held out.
      answer: what of a reply is scored: "tag" (the last <answer>), "last_number", "last_line" or
        "whole".
      system: system prompt; it should ask for the form that `answer` reads. None leaves it out.
    """

    dataset: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 2000
    num_held_out: int = 128
    seed: int = 0
    answer: str = "tag"
    system: str | None = SYSTEM

    honest_metric = "right"

    def __post_init__(self):
        if self.answer not in ANSWERS:
            raise ValueError(f"ReasoningTask.answer is {self.answer!r}; known: {ANSWERS}")
        if not 0 <= self.num_held_out < self.size:
            raise ValueError(
                f"ReasoningTask.num_held_out={self.num_held_out} must be at least 0 and below "
                f"ReasoningTask.size={self.size}"
            )

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self.dataset

    @functools.cached_property
    def _source(self) -> Any:
        """The dataset, refused where scoring a reply might run it."""
        gym = _import_gym()
        settings = {"seed": self.seed, "size": self.size, **self.settings}
        dataset = gym.create_dataset(self.dataset, **settings)
        calls = unsafe_calls(type(dataset))
        if calls:
            raise ValueError(
                f"the scorer of {self.dataset!r} may run a reply as a program (it calls "
                f"{', '.join(calls)}); choose another ReasoningTask.dataset"
            )
        return dataset

    @functools.cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        """Numbers of the training and of the held-out entries; no two ask the same question."""
        first: dict[str, int] = {}
        for number in range(self.size):
            first.setdefault(self._source[number]["question"], number)
        distinct = list(first.values())
        train, held = split(len(distinct), self.num_held_out, self.seed)
        return [distinct[i] for i in train], [distinct[i] for i in held]

    def train_prompt(self, index: int, seed: int) -> Item:
        """Returns draw `index`: each distinct training question once an epoch."""
        train, _ = self._numbers
        return self._item(train[shuffled(index, len(train), seed)])

    def held_out(self) -> list[Item]:
        """Returns questions that training never asks."""
        return [self._item(number) for number in self._numbers[1]]

    def _item(self, number: int) -> Item:
        entry = self._source[number]
        messages = [{"role": "user", "content": entry["question"]}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return Item(messages=messages, answer=str(entry["answer"]), info={"entry": entry})

    def reward(self, item: Item, reply: str, num_tokens: int, finished: bool) -> RewardResult:
        """Pays what the dataset's scorer gives the reply's answer, if the reply finished.

        Scorers give a little for an answer that contains the right one; "right" is 1 only for full
        marks.
        """
        answer = self._extract(reply)
        marks = 0.0
        if answer is not None:
            marks = float(self._source.score_answer(answer, item.info["entry"]))
        return RewardResult(
            marks * finished,
            {
                "right": float(marks >= 1.0 and finished),
                "answered": float(answer is not None),
                "eos": float(finished),
                "length": float(num_tokens),
            },
        )

    def _extract(self, reply: str) -> str | None:
        if self.answer == "whole":
            return reply.strip() or None
        if self.answer == "last_line":
            return (reply.strip().splitlines() or [None])[-1]
        pattern = r"-?\d+(?:\.\d+)?" if self.answer == "last_number" else r"<answer>(.*?)</answer>"
        found = re.findall(pattern, reply, re.DOTALL)
        return found[-1].strip() if found else None


def _import_gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            'ReasoningTask needs reasoning-gym; install it with: pip install "jaxspec[demo]"'
        ) from error


def unsafe_calls(dataset: type) -> list[str]:
    """Returns what a dataset's `score_answer` may call that runs text as a program.

    Follows its own package's functions and methods by name from `score_answer` on. What cannot be
    read counts as unsafe.
    """
    package = dataset.__module__.partition(".")[0]
    waiting, seen, found = [dataset.score_answer], set(), set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in seen:
            continue
        seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            found.add(getattr(function, "__qualname__", repr(function)))
            continue
        module = vars(sys.modules[function.__module__])
        for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
            owner = call.value.id if _is_attribute_of_name(call) else ""
            name = getattr(call, "attr", getattr(call, "id", ""))
            if name in _UNSAFE_CALLS and owner not in _SAFE_MODULES:
                found.add(name)
            methods = owner in ("self", "cls", dataset.__name__)
            target = getattr(dataset, name, None) if methods else module.get(name)
            if inspect.isfunction(target) and target.__module__.partition(".")[0] == package:
                waiting.append(target)
    return sorted(found)


def _is_attribute_of_name(call: ast.expr) -> bool:
    return isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name)
