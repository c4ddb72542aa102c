"""The adapter, against a stand-in for the library: held-out questions, scoring, and no eval."""

import sys
import types

import pytest

from jaxspec.tasks.reasoning import ReasoningTask, unsafe_calls


class Adding:
    """Asks for a + b; the same question comes up for several entries, as in the real library."""

    def __init__(self, seed, size, largest=9):
        self.seed, self.size, self.largest = seed, size, largest

    def __getitem__(self, index):
        a, b = divmod((self.seed + index) % (self.largest * self.largest), self.largest)
        return {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        return 0.1 if entry["answer"] in answer else 0.0


class Evaluating(Adding):
    def score_answer(self, answer, entry):
        return self.checked(answer, entry)

    def checked(self, answer, entry):
        return float(evaluated(answer) == int(entry["answer"]))


def evaluated(answer):
    return eval(answer)


class Prepared(Adding):
    """Builds its questions with eval, which is its own affair."""

    def __getitem__(self, index):
        entry = super().__getitem__(index)
        return entry | {"answer": str(eval(entry["question"].strip("=")))}


@pytest.fixture(autouse=True)
def gym(monkeypatch):
    module = types.ModuleType("reasoning_gym")
    datasets = {"adding": Adding, "evaluating": Evaluating, "prepared": Prepared}
    module.create_dataset = lambda name, **settings: datasets[name](**settings)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    return module


def make(**kwargs):
    return ReasoningTask(**{"dataset": "adding", "size": 200, "num_held_out": 20} | kwargs)


def question(item):
    return item.messages[-1]["content"]


def test_no_held_out_question_is_trained_even_if_entries_repeat():
    task = make()
    held = {question(item) for item in task.held_out()}
    trained = [question(task.train_prompt(i, seed=2)) for i in range(61)]
    assert len(held) == 20 and not held & set(trained)
    assert len(set(trained)) == 61 and len(held | set(trained)) == 81


def test_the_dataset_scores_the_extracted_answer():
    task = make()
    item = task.train_prompt(0, seed=0)
    wrong = str(int(item.answer) + 100)

    def result(reply, finished=True):
        return task.reward(item, reply, 9, finished)

    good = f"so <answer>{item.answer}</answer>"
    assert result(good).reward == 1.0 and result(good).metrics["right"] == 1.0
    assert result(good, finished=False).reward == 0.0
    assert result(f"<answer>{item.answer}</answer> <answer>{wrong}</answer>").metrics["right"] == 0
    partial = result(f"<answer>{item.answer} or {item.answer}</answer>")
    assert partial.reward == pytest.approx(0.1) and partial.metrics["right"] == 0.0
    assert result("no tag").metrics == {"right": 0, "answered": 0, "eos": 1, "length": 9}


@pytest.mark.parametrize(
    ("answer", "reply", "read"),
    [
        ("last_number", "1 and 2 make -3.5 apples", "-3.5"),
        ("last_number", "none", None),
        ("last_line", "first\nsecond\n", "second"),
        ("last_line", "", None),
        ("whole", " all of it ", "all of it"),
        ("tag", "<answer>two\nlines</answer>", "two\nlines"),
    ],
)
def test_what_of_a_reply_is_read(answer, reply, read):
    assert make(answer=answer)._extract(reply) == read


def test_a_scorer_that_runs_replies_is_refused(tmp_path):
    # What would happen: the reply runs.
    proof = tmp_path / "proof"
    attack = f"__import__('os').system('touch {proof}')"
    Evaluating(0, 1).score_answer(attack, {"answer": "0"})
    assert proof.exists()
    proof.unlink()
    with pytest.raises(ValueError, match="'evaluating' may run a reply.*calls eval"):
        unsafe = make(dataset="evaluating", answer="whole")
        unsafe.reward(make().held_out()[0], attack, 9, True)
    assert not proof.exists()
    # And with any dataset that is let through it is only text.
    task = make(answer="whole")
    assert task.reward(task.held_out()[0], attack, 9, True).metrics["right"] == 0.0
    assert not proof.exists()


def test_eval_on_the_datasets_own_text_is_no_reason_to_refuse():
    assert unsafe_calls(Evaluating) == ["eval"]
    assert unsafe_calls(Prepared) == []
    assert make(dataset="prepared").held_out()


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install "jaxspec\[demo\]"'):
        make().held_out()


def test_settings_reach_the_dataset_and_errors_name_them():
    assert len({question(i) for i in make(settings={"largest": 5}).held_out()}) == 20
    assert make(system=None).held_out()[0].messages[0]["role"] == "user"
    with pytest.raises(ValueError, match="held_out=20 of 4 prompts"):
        make(settings={"largest": 2}).held_out()
    with pytest.raises(ValueError, match="ReasoningTask.answer is 'xml'"):
        make(answer="xml")
    with pytest.raises(ValueError, match="num_held_out=200 .*size=200"):
        make(num_held_out=200)
