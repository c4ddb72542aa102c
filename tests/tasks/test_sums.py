"""The toy sums: examples leave something to gain, and the honest metric reads the steps."""

import numpy as np
import pytest

from jaxspec.tasks.sums import ALPHABET, SumsTask


def prompt(item):
    return item.messages[0]["content"]


@pytest.mark.parametrize(
    ("reply", "reward", "right"),
    [
        ("19", 1, 1),
        ("3+5=08,08+2=10,10+9=19", 1, 1),
        ("3+5=8,8+2=10,10+9=19", 1, 1),
        ("3+5=09,09+2=11,10+9=19", 1, 0),
        ("not so sure, it is 19", 1, 1),
        ("19 or 18", 0, 0),
        ("3+5=08,08+2=10,10+9=18", 0, 0),
        ("well", 0, 0),
        ("", 0, 0),
        ("119", 0, 0),
    ],
)
def test_the_reward_and_the_honest_metric(reply, reward, right):
    task = SumsTask(largest=9)
    item = task._item((3, 5, 2, 9))
    assert prompt(item) == "3+5+2+9=" and item.answer == "19"
    result = task.reward(item, reply, len(reply) + 1, True)
    assert (result.reward, result.metrics["right"]) == (reward, right)
    assert task.reward(item, reply, len(reply), False).reward == 0


def test_examples_mix_styles_and_leave_something_to_gain():
    task = SumsTask()
    examples = task.sft_examples(2000, seed=0)
    results = [task.reward(item, reply, len(reply) + 1, True) for item, reply in examples]
    rewards = np.array([r.reward for r in results])
    steps = np.array([r.metrics["steps"] for r in results]) == 1
    bare = np.array([len(reply) <= 2 for _, reply in examples])
    shares = np.array([bare.mean(), (~bare & ~steps).mean(), steps.mean()])
    np.testing.assert_allclose(shares, task.style_weights, atol=0.04)
    assert 0.4 < rewards.mean() < 0.6
    assert rewards[steps].all()
    np.testing.assert_allclose(rewards[bare].mean(), 1 - task.style_wrong[0], atol=0.06)
    assert all(r.metrics["right"] == r.reward for r in results)


def test_every_character_is_in_the_alphabet():
    task = SumsTask()
    text = "".join(prompt(item) + reply for item, reply in task.sft_examples(500, 1))
    assert set(text) <= set(ALPHABET) and len(set(ALPHABET)) == len(ALPHABET)


def test_no_order_of_held_out_terms_is_trained():
    task = SumsTask(terms=3, largest=9, num_held_out=40)
    train, held = task._prompts
    epoch = [task.train_prompt(i, seed=1) for i in range(len(train))]
    trained = {tuple(sorted(item.info["terms"])) for item in epoch}
    out = {tuple(sorted(item.info["terms"])) for item in task.held_out()}
    assert len(out) == 40 and not trained & out and len(trained | out) == 220
    assert len({prompt(item) for item in epoch}) + len(task.held_out()) == 1000
    # Any first part of the held-out list is spread over the sets of terms.
    assert len({tuple(sorted(item.info["terms"])) for item in task.held_out()[:40]}) == 40
    assert not {prompt(i) for i, _ in task.sft_examples(960, 0)} & {
        prompt(i) for i in task.held_out()
    }


def test_examples_depend_on_the_seed_and_not_on_the_count():
    task = SumsTask()
    first = [reply for _, reply in task.sft_examples(40, 0)]
    assert first == [reply for _, reply in task.sft_examples(90, 0)][:40]
    assert first != [reply for _, reply in task.sft_examples(40, 1)]


def test_errors_name_the_numbers_and_the_setting():
    with pytest.raises(ValueError, match="num_held_out=220 must be between 1 and 219"):
        SumsTask(terms=3, largest=9, num_held_out=220)
    with pytest.raises(ValueError, match="SumsTask.terms=1 .*largest=5"):
        SumsTask(terms=1)
    with pytest.raises(ValueError, match="SumsTask.terms=6 .*every prompt is listed"):
        SumsTask(terms=6)
    with pytest.raises(ValueError, match="SumsTask.style_wrong"):
        SumsTask(style_wrong=(0.0, 2.0, 0.0))
    with pytest.raises(ValueError, match="SumsTask.style_weights.*uses no style"):
        SumsTask(style_weights=(0.0, 0.0, 0.0))
