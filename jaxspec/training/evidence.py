"""What a run has measured, and what that says: each answer a number with its interval.

An answer is "yes" only where the whole interval says so.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.training.metrics import (
    Interval,
    change_interval,
    mean_interval,
    ratio_interval,
    steps_interval,
)

ORIGINS = ("policy", "accepted", "rejected")
PHASES = ("rollout", "reward", "pack", "update", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation on the held-out prompts, always the same ones in the same order.

    Attributes:
      step: how many updates the policy had had; 0 is the untrained one.
      reward: reward of each prompt (the mean over its replies), [prompts].
      honest: the honest metric of each prompt, [prompts]; None if not measured.
      greedy: whether the greedy reply is right (0 or 1), [prompts]; None if not measured.
      lengths: tokens of each prompt's reply, [prompts]; None if not measured.
      acceptance: expected acceptance length of the co-trained draft on these replies.
      acceptance_frozen: the same of the draft as it was before the run.
    """

    step: int
    reward: Any
    honest: Any = None
    greedy: Any = None
    lengths: Any = None
    acceptance: Any = None
    acceptance_frozen: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Interleaved timings of rollouts with and without the draft; pair i ran back to back.

    Attributes:
      batch_size: sequences generated together.
      draft_seconds: seconds with the draft, [pairs].
      draft_tokens: tokens generated with the draft, [pairs].
      plain_seconds: seconds without, [pairs].
      plain_tokens: tokens generated without, [pairs].
      acceptance_length: tokens a verification emitted in these rollouts; None if not measured.
      num_draft_tokens: tokens drafted before each verification; None if not known.
      own: whether this is the batch size of the run's own rollouts.
    """

    batch_size: int
    draft_seconds: Any
    draft_tokens: Any
    plain_seconds: Any
    plain_tokens: Any
    acceptance_length: Any = None
    num_draft_tokens: int | None = None
    own: bool = False

    def __post_init__(self):
        sizes = {
            name: np.size(getattr(self, name))
            for name in ("draft_seconds", "draft_tokens", "plain_seconds", "plain_tokens")
        }
        if len(set(sizes.values())) != 1:
            raise ValueError(f"Speed compares pairs, so all lists must be of one length: {sizes}")

    @property
    def draft_rates(self) -> np.ndarray:
        """Tokens a second with the draft, [pairs]."""
        return np.asarray(self.draft_tokens, float) / np.asarray(self.draft_seconds, float)

    @property
    def plain_rates(self) -> np.ndarray:
        """Tokens a second without the draft, [pairs]."""
        return np.asarray(self.plain_tokens, float) / np.asarray(self.plain_seconds, float)

    @property
    def ratio(self) -> Interval:
        """Speed with the draft over speed without."""
        return ratio_interval(self.draft_rates, self.plain_rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """A reply as text, in pieces by where its tokens came from (see `rollout_pieces`).

    Attributes:
      step: the step whose policy and draft made it.
      prompt: the prompt.
      pieces: (text, origin), the origin one of "policy" (drawn by the policy), "accepted" (draft
        tokens that the policy took) and "rejected" (a draft token that is not in the reply: the
        piece after it is the policy's correction).
      reward: its reward; None if it has none.
    """

    step: int
    prompt: str
    pieces: Sequence[tuple[str, str]]
    reward: Any = None

    def __post_init__(self):
        for _, origin in self.pieces:
            if origin not in ORIGINS:
                raise ValueError(f"a piece's origin is {origin!r}; it must be one of {ORIGINS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report is made from.

    Attributes:
      title: heading of the page.
      summary: a sentence or two on what was run.
      config_text: the settings of the run, as text.
      versions: what it ran with, such as `environment.versions()`.
      records: one mapping a step, as in `metrics.jsonl`; read are "step", "reward", "honest",
        "acceptance_length" (of the rollouts), "expected_acceptance" (of the co-trained draft on
        the step's rollouts), "expected_acceptance_frozen" (of the warm-up draft on the same),
        "policy_loss", "draft_loss" and "seconds" (a mapping with the keys of `PHASES`). Any may
        be missing or None.
      evaluations: on held-out prompts, in order of steps; the first is the reference.
      speed: timings; the first entry gives the answer's number.
      samples: rollouts to show.
      reward_name: what the reward is, in words.
      honest_name: what the honest metric is, in words.
    """

    title: str
    summary: str = ""
    config_text: str = ""
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Evaluation] = ()
    speed: Sequence[Speed] = ()
    samples: Sequence[Rollout] = ()
    reward_name: str = "reward"
    honest_name: str = "honest metric"

    def __post_init__(self):
        counts = [np.size(e.reward) for e in self.evaluations]
        if len(set(counts)) > 1:
            raise ValueError(f"evaluations are on {counts} prompts; they are compared in pairs")
        steps = [r["step"] for r in self.records]
        if steps != sorted(set(steps)):
            raise ValueError("the steps of ReportData.records must ascend")

    def series(self, key: str) -> np.ndarray:
        """Returns one value a step, nan where it is missing, [steps]."""
        values = [record.get(key) for record in self.records]
        return np.array([math.nan if v is None else float(v) for v in values])

    @property
    def steps(self) -> np.ndarray:
        """The steps of the records."""
        return np.array([record["step"] for record in self.records], int)

    def ends(self, *keys: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of the first and of the last steps that have all of `keys`.

        The first are a tenth of them, and at least 5; the last are a third.
        """
        have = np.all([np.isfinite(self.series(key)) for key in keys], axis=0)
        rows = np.flatnonzero(have)
        return rows[: max(5, len(rows) // 10)], rows[2 * len(rows) // 3 :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the run says about one question.

    Attributes:
      key: "reward", "acceptance" or "speed".
      question: in words.
      verdict: "Yes", "No", "Partly", "Not shown" or "Not measured".
      number: the estimate, formatted.
      unit: what the number is.
      interval: its 95% interval, in words.
      basis: what the interval rests on, in words.
      sentence: the answer in a sentence.
      notes: what else belongs to it.
    """

    key: str
    question: str
    verdict: str
    number: str
    unit: str
    interval: str
    basis: str
    sentence: str
    notes: tuple[str, ...] = ()


def answers(data: ReportData) -> tuple[Answer, Answer, Answer]:
    """Answers whether the reward rose, the draft kept up, and rollouts got faster."""
    return _reward_answer(data), _acceptance_answer(data), _speed_answer(data)


def _reward_answer(data: ReportData) -> Answer:
    rewards, (first, last) = data.series("reward"), data.ends("reward")
    training = change_interval(rewards[first], rewards[last])
    note = (
        f"On the training prompts, mean {data.reward_name} of the last {len(last)} steps minus "
        f"that of the first {len(first)}: {signed(training)}."
    )
    common = {"key": "reward", "question": "Did the reward rise?"}
    if len(data.evaluations) < 2:
        verdict = "Not measured" if not training.known else "Not shown"
        return Answer(
            **common,
            verdict=verdict,
            number=number(training.value, sign=True),
            unit=f"mean {data.reward_name} on training prompts, last steps minus first",
            interval=_ends(training),
            basis=f"{training.count} steps",
            sentence="The trained policy was not compared with the untrained one on held-out "
            "prompts; the training prompts alone do not show it.",
        )
    before, after = data.evaluations[0], data.evaluations[-1]
    change = paired(before.reward, after.reward)
    untrained = "untrained policy" if before.step == 0 else f"policy of step {before.step}"
    levels = f"from {number(np.mean(before.reward))} to {number(np.mean(after.reward))}"
    verdict = _verdict(change)
    sentence = {
        "Yes": f"On the same {change.count} held-out prompts the {data.reward_name} rose {levels}.",
        "No": f"On the same {change.count} held-out prompts the {data.reward_name} fell {levels}.",
        "Not shown": f"On the same {change.count} held-out prompts the {data.reward_name} went "
        f"{levels}; that is within what chance explains.",
    }[verdict]
    notes = []
    for name, attribute in ((data.honest_name, "honest"), ("greedy accuracy", "greedy")):
        old, new = getattr(before, attribute), getattr(after, attribute)
        if old is None or new is None:
            continue
        other = paired(old, new)
        went = {"Yes": "rose", "No": "fell"}.get(_verdict(other), "was not shown to change")
        levels = f"{number(np.mean(old))} to {number(np.mean(new))}"
        notes.append(f"{_capital(name)} {went}: {levels}, {signed(other)}.")
        if attribute == "honest" and verdict == "Yes" and not other.above(0):
            verdict = "Partly"
            sentence += f" The {data.honest_name} did not follow: the reward may be gamed."
    return Answer(
        **common,
        verdict=verdict,
        number=number(change.value, sign=True),
        unit=f"mean {data.reward_name} on held-out prompts, trained minus {untrained}",
        interval=_ends(change),
        basis=f"{change.count} prompts, paired",
        sentence=sentence,
        notes=(*notes, note) if training.count else tuple(notes),
    )


def _acceptance_answer(data: ReportData) -> Answer:
    keys = ("expected_acceptance", "expected_acceptance_frozen")
    (live, frozen), (first, last) = (data.series(k) for k in keys), data.ends(*keys)
    gap = steps_interval((live - frozen)[last])
    kept = change_interval(live[first], live[last])
    lost = change_interval(frozen[first], frozen[last])
    verdict = _verdict(gap)
    if not gap.count:
        sentence = "No step scored both drafts on the same rollouts."
    elif verdict == "Not shown":
        sentence = "Over the last third of the steps the two drafts do not differ by more than "
        sentence += "chance explains."
    elif verdict == "No":
        sentence = "The co-trained draft is accepted less than the frozen one."
    elif kept.below(0):
        verdict = "Partly"
        sentence = "The co-trained draft is accepted more than the frozen one, but lost some of "
        sentence += "its own acceptance too."
    elif not lost.below(0):
        verdict = "Partly"
        sentence = "The co-trained draft is accepted more than the frozen one, but the frozen one "
        sentence += "was not shown to lose any."
    else:
        sentence = "The frozen draft lost acceptance as the policy moved away from it; the "
        sentence += f"co-trained one {'gained' if kept.above(0) else 'kept its own'}."
    notes = ()
    if gap.count:
        notes = (
            f"Mean over the last third: co-trained {number(live[last].mean())}, frozen "
            f"{number(frozen[last].mean())} tokens a verification, both scored on the same "
            "rollouts.",
            f"Against the first {len(first)} steps the co-trained draft changed by "
            f"{signed(kept)}, the frozen one by {signed(lost)}.",
        )
    return Answer(
        key="acceptance",
        question="Does the co-trained draft keep its acceptance where a frozen one loses it?",
        verdict=verdict,
        number=number(gap.value, sign=True),
        unit="expected acceptance length, co-trained minus frozen draft on the same rollouts",
        interval=_ends(gap),
        basis=f"the last {gap.count} steps",
        sentence=sentence,
        notes=notes,
    )


def _speed_answer(data: ReportData) -> Answer:
    common = {"key": "speed", "question": "Are rollouts faster with the draft than without?"}
    time = time_rows(data)
    notes = []
    if time:
        name, row = time[-1]
        total = sum(row.values()) or math.nan
        shares = ", ".join(f"{p} {v / total:.0%}" for p, v in row.items() if v > 0)
        notes.append(f"A step took {number(total)} s over its {name}: {shares}.")
    if not data.speed:
        return Answer(
            **common,
            verdict="Not measured",
            number=number(math.nan),
            unit="speed with the draft over speed without",
            interval="no interval",
            basis="no timings",
            sentence="The run took no timings without the draft.",
            notes=tuple(notes),
        )
    own = data.speed[0]
    ratio = own.ratio
    with_draft, plain = np.mean(own.draft_rates), np.mean(own.plain_rates)
    rates = f"{with_draft:,.0f} tokens a second with the draft, {plain:,.0f} without"
    verdict = _verdict(ratio, 1.0)
    tail = {
        "Yes": "The draft makes rollouts faster.",
        "No": "The draft makes rollouts slower here.",
        "Not shown": "The difference is within what chance explains.",
    }[verdict]
    others = "".join(
        f" At batch size {other.batch_size}{_drafted(other)}: "
        f"{other.ratio.value:.2f}\N{MULTIPLICATION SIGN} "
        f"({span(other.ratio, 2)}, {other.ratio.count} pairs)."
        for other in data.speed[1:]
    )
    return Answer(
        **common,
        verdict=verdict,
        number=f"{ratio.value:.2f}\N{MULTIPLICATION SIGN}",
        unit=f"speed with the draft over speed without, batch size {own.batch_size}",
        interval=_ends(ratio, digits=2),
        basis=f"{ratio.count} interleaved pairs",
        sentence=(
            f"Measured side by side in this run at batch size {own.batch_size}{_drafted(own)}: "
            f"{rates}. "
            f"{tail}{others}"
        ),
        notes=tuple(notes),
    )


def _drafted(speed: Speed) -> str:
    return "" if speed.num_draft_tokens is None else f", {speed.num_draft_tokens} drafted"


def time_rows(data: ReportData) -> list[tuple[str, dict[str, float]]]:
    """Median seconds of each phase, by thirds of the run; a median leaves compiling steps out."""
    have = [r["seconds"] for r in data.records if r.get("seconds")]
    if not have:
        return []
    thirds = [("whole run", have)]
    if len(have) >= 6:
        cuts = [len(have) * i // 3 for i in range(4)]
        names = ("first third", "middle third", "last third")
        thirds = [(n, have[a:b]) for n, a, b in zip(names, cuts, cuts[1:], strict=False)]
    return [
        (name, {p: float(np.median([r.get(p) or 0.0 for r in part])) for p in PHASES})
        for name, part in thirds
    ]


def paired(before: Any, after: Any) -> Interval:
    """The mean change over the same prompts."""
    return mean_interval(np.asarray(after, float) - np.asarray(before, float))


def _verdict(interval: Interval, nothing: float = 0.0) -> str:
    if not interval.count:
        return "Not measured"
    if interval.above(nothing):
        return "Yes"
    return "No" if interval.below(nothing) else "Not shown"


def number(value: Any, sign: bool = False, digits: int = 3) -> str:
    """Formats a number with about `digits` digits; a dash where there is none."""
    value = float(value)
    if not math.isfinite(value):
        return "\N{EM DASH}"
    if abs(value) >= 10**digits:
        text = f"{value:,.0f}"
    else:
        whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
        places = max(0, digits - whole + (abs(value) < 1))
        # Very small numbers would read as zero.
        tiny = value != 0 and abs(value) < 0.5 * 10**-places
        text = f"{value:.1e}".replace("e-0", "e-") if tiny else f"{value:.{places}f}"
    text = text.replace("-", "\N{MINUS SIGN}")
    return f"+{text}" if sign and value > 0 else text


def span(interval: Interval, digits: int | None = None, sign: bool = False) -> str:
    """Formats the ends of an interval."""
    if not interval.known:
        return "too few to tell"
    low, high = (
        f"{v:.{digits}f}" if digits is not None else number(v, sign=sign)
        for v in (interval.low, interval.high)
    )
    return f"{low} to {high}"


def _ends(interval: Interval, digits: int | None = None) -> str:
    if not interval.known:
        return "no interval: too few to tell"
    return f"95% interval {span(interval, digits, sign=digits is None)}"


def signed(interval: Interval) -> str:
    """Formats a change with its interval."""
    return f"{number(interval.value, sign=True)} ({span(interval, sign=True)})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
