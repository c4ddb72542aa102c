"""The comparison task: honest scoring, and held-out pairs that no order of training shows."""

import pytest

from jaxspec.tasks import comparison
from jaxspec.tasks.comparison import ComparisonTask, claimed_number


def item_of(first, second):
    return ComparisonTask()._item(first, second)


@pytest.mark.parametrize(
    ("reply", "claimed"),
    [
        ("96 is larger than 20.", "96"),
        ("20 is larger than 96 because 20 is 20 larger than 96", "20"),
        ("20 is 20 larger than 96", "20"),
        ("We compare 20 and 96. The number 96 is more than 20, so it is 96.", "96"),
        ("Between 20 and 96, the larger number is 20.", "96"),
        ("The answer is 96", None),
        ("96. It is larger.", None),
        ("96 has one digit more, 20 is greater", "96"),
        ("96 comes first and, as everybody can tell you, is larger", None),
        ("20 is not larger than 96", None),
        ("20 isn't greater than 96", None),
        ("The number 196 is larger than 20", "196"),
        ("", None),
    ],
)
def test_what_a_reply_claims(reply, claimed):
    assert claimed_number(reply) == claimed


def test_a_hacked_reply_is_not_right():
    item, reply = item_of(20, 96), "20 is larger than 96 because 20 is 20 larger than 96"
    result = ComparisonTask().reward(item, reply, 27, True)
    assert result.reward == 0.0 and result.metrics["claim_correct"] == 0.0
    # The reward it fools reads the last number.
    assert reply.split()[-1] == item.answer


@pytest.mark.parametrize(
    ("reply", "tokens", "finished", "reward"),
    [
        ("96 is larger than 20.", 30, True, 1.0),
        ("96 is larger than 20.", 24, True, 1.0),
        ("96 is larger than 20.", 16, True, 0.5),
        ("96 is larger than 20.", 8, True, 0.0),
        ("96 is larger than 20.", 3, True, 0.0),
        ("96 is larger than 20.", 30, False, 0.0),
        ("96", 24, True, 0.3),
        ("20 is smaller than 96", 24, True, 0.0),
        ("20 or 96? 96 is larger", 24, True, 1.0),
        ("no number", 24, True, 0.0),
    ],
)
def test_the_reward(reply, tokens, finished, reward):
    result = ComparisonTask().reward(item_of(20, 96), reply, tokens, finished)
    assert result.reward == pytest.approx(reward)
    assert result.metrics["eos"] == finished and result.metrics["length"] == tokens


def pair(item):
    return frozenset(item.info["operands"])


def test_neither_order_of_a_held_out_pair_is_trained():
    task = ComparisonTask(largest=29, num_held_out=40)
    held = {pair(item) for item in task.held_out()}
    trained = [task.train_prompt(i, seed=7) for i in range(2 * (190 - 40))]
    assert len(held) == 40
    assert not held & {pair(item) for item in trained}
    assert len(held | {pair(item) for item in trained}) == 190
    # Every training pair comes once in each order.
    assert len({tuple(item.info["operands"]) for item in trained}) == len(trained)


def test_the_held_out_check_sees_one_order_held_out_alone(monkeypatch):
    # The fault: prompts, not pairs, are split, so that (B, A) is trained where (A, B) is held out.
    monkeypatch.setattr(
        ComparisonTask,
        "_pairs",
        [(a, b) for a in range(10, 30) for b in range(10, 30) if a != b],
    )
    task = ComparisonTask(largest=29, num_held_out=40)
    held = {pair(item) for item in task.held_out()}
    assert held & {pair(task.train_prompt(i, seed=7)) for i in range(600)}


def test_position_says_nothing_about_the_held_out_answer():
    items = ComparisonTask().held_out()
    assert len(items) == 144
    first = sum(item.answer == str(item.info["operands"][0]) for item in items)
    assert first == 72
    assert [i.messages for i in items] == [i.messages for i in ComparisonTask().held_out()]


def test_the_prompt_is_the_documented_one():
    messages = item_of(20, 96).messages
    assert messages == [
        {"role": "system", "content": comparison.SYSTEM},
        {"role": "user", "content": "Which number is larger, 20 or 96?"},
    ]
    assert messages[0]["content"].startswith("You are a careful math tutor. Explain in one")


def test_errors_name_both_numbers_and_the_setting():
    with pytest.raises(ValueError, match="num_held_out=190 must be below .* 190"):
        ComparisonTask(largest=29, num_held_out=190)
    with pytest.raises(ValueError, match=r"smallest=99 .*\.largest=99"):
        ComparisonTask(smallest=99)
    with pytest.raises(ValueError, match=r"floor_tokens=24 .*\.full_tokens=24"):
        ComparisonTask(floor_tokens=24)
