import dataclasses
import html
import re

import numpy as np
import pytest

from jaxspec.training import evidence
from jaxspec.training.environment import versions
from jaxspec.training.report import (
    Evaluation,
    ReportData,
    Rollout,
    Speed,
    answers,
    rollout_pieces,
    rollout_text,
    write_report,
)


def make_data(*, rise=0.3, honest=0.3, gap=0.5, live=0.0, ratio=1.4, steps=60, every=1):
    rng = np.random.default_rng(0)
    share = np.arange(1, steps + 1) / steps
    records = []
    for i in range(steps):
        record = {
            "step": i + 1,
            "reward": 0.2 + rise * share[i] + rng.normal(0, 0.03),
            "policy_loss": rng.normal(0, 0.01),
            "draft_loss": 1.0 - 0.2 * share[i],
            "acceptance_length": 2.2,
            "seconds": {"rollout": 2.0 if i else 60.0, "update": 1.0},
        }
        if i % every == 0:
            record["expected_acceptance"] = 2.3 + live * share[i] + rng.normal(0, 0.03)
            record["expected_acceptance_frozen"] = 2.3 - gap * share[i] + rng.normal(0, 0.03)
        records.append(record)
    base = rng.uniform(0, 0.5, 64)
    evaluations = [
        Evaluation(
            step=step,
            reward=base + done * rise + rng.normal(0, 0.05, 64),
            honest=base + done * honest + rng.normal(0, 0.05, 64),
            greedy=np.zeros(64),
        )
        for step, done in ((0, 0), (steps, 1))
    ]
    load = rng.uniform(1.0, 2.0, 8)
    tokens = np.full(8, 1000)
    draft_seconds = load / ratio * rng.normal(1.0, 0.02, 8)
    speed = [
        Speed(
            batch_size=8,
            draft_seconds=draft_seconds,
            draft_tokens=tokens,
            plain_seconds=load,
            plain_tokens=tokens,
        )
    ]
    pieces = (("1 + 1", "policy"), (" is", "accepted"), (" <3", "rejected"), (" 2", "policy"))
    return ReportData(
        title="A run",
        records=records,
        evaluations=evaluations,
        speed=speed,
        samples=[Rollout(step=1, prompt="What <b>is</b> it?", pieces=pieces, reward=1.0)],
        versions=versions(),
        config_text="seed = 1",
        honest_name="exact answers",
    )


def verdicts(data):
    return [answer.verdict for answer in answers(data)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(folder, make_data()).read_text()


def test_the_page_is_one_file_and_answers_first(report):
    folder, page = report
    visible = html.unescape(re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "data:", page))
    assert "http://" not in visible and "https://" not in visible
    addresses = re.findall(r"(?:src|href|srcset)=\"([^\"]*)\"", visible)
    assert addresses and all(a.startswith(("data:", "#")) for a in addresses)
    for answer in answers(make_data()):
        assert answer.verdict == "Yes"
        for part in (answer.question, answer.number, answer.interval, answer.sentence):
            assert part in visible
        assert visible.index(answer.number) < visible.index("What <b>is</b> it?")
    for name in ("reward", "acceptance", "speed", "time", "losses", "summary"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert 'class="accepted"> is</span><del class="rejected"> <3</del>' in visible
    assert "What &lt;b&gt;is" in page and "seed = 1" in page and versions()["jax"] in page


def test_the_report_is_the_same_each_time(report, tmp_path):
    _, page = report
    assert write_report(tmp_path, make_data()).read_text() == page


def test_nothing_is_claimed_where_nothing_changed(tmp_path):
    data = make_data(rise=0.0, honest=0.0, gap=0.0, ratio=1.0)
    assert verdicts(data) == ["Not shown"] * 3
    assert "Yes" not in write_report(tmp_path, data).read_text()


def test_the_opposite_is_a_no():
    assert verdicts(make_data(rise=-0.3, gap=-0.5, ratio=0.8)) == ["No"] * 3


def test_a_reward_that_rises_alone_is_called_out():
    answer, *_ = answers(make_data(honest=0.0))
    assert answer.verdict == "Partly" and "may be gamed" in answer.sentence


@pytest.mark.parametrize(
    ("live", "gap", "verdict", "words"),
    [
        (0.0, 0.5, "Yes", "kept its own"),
        (0.4, 0.5, "Yes", "gained"),
        (-0.4, 0.9, "Partly", "lost some of its own"),
        (0.5, 0.0, "Partly", "was not shown to lose any"),
    ],
)
def test_both_drafts_decide_the_second_answer(live, gap, verdict, words):
    _, answer, _ = answers(make_data(live=live, gap=gap))
    assert answer.verdict == verdict and words in answer.sentence


def test_drafts_that_are_scored_only_now_and_then():
    _, answer, _ = answers(make_data(every=3))
    assert answer.verdict == "Yes" and answer.basis == "the last 7 steps"


def test_speeds_are_compared_pair_by_pair():
    # The machine's load varies far more than the ratio; unpaired, nothing could be said.
    data = make_data(ratio=1.1)
    assert verdicts(data)[2] == "Yes"
    own = data.speed[0]
    shuffled = dataclasses.replace(own, plain_seconds=np.roll(own.plain_seconds, 3))
    assert verdicts(dataclasses.replace(data, speed=[shuffled]))[2] == "Not shown"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_with_little_in_it_still_has_a_report(tmp_path, steps):
    data = make_data(steps=steps)
    records = [{**r, "reward": None, "draft_loss": None} for r in data.records]
    data = dataclasses.replace(data, records=records, speed=[], evaluations=data.evaluations[:1])
    page = write_report(tmp_path, data).read_text()
    assert verdicts(data) == ["Not measured", "Not shown", "Not measured"]
    assert "nan" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert "Yes" not in page


def test_an_empty_report(tmp_path):
    page = write_report(tmp_path, ReportData(title="Nothing")).read_text()
    assert page.count("Not measured") >= 3 and "Yes" not in page


def test_training_prompts_alone_prove_nothing():
    data = dataclasses.replace(make_data(), evaluations=[])
    assert verdicts(data)[0] == "Not shown"


def test_the_summary_picture_fits_a_page(report):
    folder, _ = report
    head = (folder / "summary.png").read_bytes()[:24]
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    assert 1400 <= width <= 1600 and 400 <= height <= 500


def test_time_of_a_step_leaves_the_compiling_one_out():
    for _, row in evidence.time_rows(make_data()):
        assert row["rollout"] == 2.0 and row["update"] == 1.0


def test_rollouts_are_cut_by_where_their_tokens_came_from():
    # A character of two tokens: its first half alone decodes to the replacement character.
    text = "12é3=4".encode()

    def decode(ids):
        return bytes(text[i] if i < 100 else ord("x") for i in ids).decode(errors="replace")

    tokens = [0, 1, 2, 3, 4, 5, 6, 0]
    origin = [1, 2, 2, 2, 1, 2, 1, 0]
    rejected = [-1, -1, -1, -1, 100, -1, -1, 100]
    pieces = rollout_pieces(tokens, origin, rejected, 7, decode)
    assert pieces == (
        ("1", "policy"),
        ("2é", "accepted"),
        ("x", "rejected"),
        ("3", "policy"),
        ("=", "accepted"),
        ("4", "policy"),
    )
    rollout = Rollout(step=3, prompt="p", pieces=(*pieces, ("[a]", "accepted")), reward=0.5)
    assert rollout_text(rollout) == "=== step 3  reward 0.5\np\n---\n1[2é]{x}3[=]4[\\[a\\]]\n"


def test_data_that_does_not_fit_is_refused():
    data = make_data()
    with pytest.raises(ValueError, match=r"\[64, 3\] prompts"):
        other = dataclasses.replace(data.evaluations[1], reward=np.zeros(3))
        dataclasses.replace(data, evaluations=[data.evaluations[0], other])
    with pytest.raises(ValueError, match="must ascend"):
        dataclasses.replace(data, records=[{"step": 2}, {"step": 1}])
    with pytest.raises(ValueError, match="of one length"):
        dataclasses.replace(data.speed[0], plain_tokens=[1, 2])
    with pytest.raises(ValueError, match="'draft'"):
        Rollout(step=0, prompt="", pieces=[("x", "draft")])
