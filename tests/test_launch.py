"""The commands as a person runs them: small configuration, whole way, and what mistakes say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspec.config import load_experiment
from jaxspec.io.draft_formats import read_eagle3
from jaxspec.io.safetensors import read_policy
from jaxspec.training.metrics import read_metrics
from jaxspec.training.setup import dry_run_table

ROOT = Path(__file__).parents[1]


def launch(name, *args, **kwargs):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    # These runs compute more than they compile.
    env.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    return subprocess.run(
        [sys.executable, f"launch/{name}.py", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "run"
    done = launch("train", "--gin_file=configs/tiny.gin", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_tiny_run_learns_and_its_draft_keeps_up(tiny):
    folder, _ = tiny
    records = read_metrics(folder)
    evaluations = json.loads((folder / "evaluations.json").read_text())["evaluations"]
    before, after = evaluations[0], evaluations[-2]
    assert before["name"] == "before training" and after["name"] == "after training"
    assert after["reward"] > before["reward"]
    last = records[-len(records) // 3 :]
    risen = np.mean([r["reward"] for r in last]) - np.mean([r["reward"] for r in records[:3]])
    assert risen > 0.1
    alive = np.mean([r["expected_acceptance_length"] for r in last])
    frozen = np.mean([r["frozen_expected_acceptance_length"] for r in last])
    assert alive > frozen + 0.1
    # Real rollouts agree with the scores.
    assert after["acceptance_length"] > evaluations[-1]["acceptance_length"]


def test_tiny_run_says_what_it_does(tiny):
    _, log = tiny
    assert "\x1b" not in log
    for text in ("step 1/", "warming up the draft", "Did the reward rise?", "report.html"):
        assert text in log


def test_tiny_run_leaves_what_others_load(tiny):
    folder, _ = tiny
    config, _ = read_policy(folder / "policy")
    read_eagle3(folder / "draft", config)
    page = (folder / "report.html").read_text()
    assert "Did the reward rise?" in page and "http://" not in page.replace("http://www.w3.org", "")
    loaded = load_experiment([str(folder / "operative_config.gin")])
    assert loaded == load_experiment([str(ROOT / "configs/tiny.gin")])


def test_trained_policy_and_draft_reply(tiny):
    folder, _ = tiny
    args = [f"--policy={folder / 'policy'}", f"--draft={folder / 'draft'}", "--max_new_tokens=8"]
    done = launch("rollout", *args, "--prompt=1+2+3+4=", "--prompt=5+0+0+1=", "--temperature=0")
    assert done.returncode == 0, done.stderr
    assert "> 1+2+3+4=" in done.stdout and "acceptance length" in done.stdout
    empty = launch("rollout", *args, "--prompt_file=-", input="\n \n")
    assert empty.returncode == 1 and "holds no prompts" in empty.stderr


@pytest.mark.parametrize("name", ["tiny", "qwen3_8b"])
def test_shipped_configurations_are_sound(name):
    experiment = load_experiment([str(ROOT / f"configs/{name}.gin")])
    table = dry_run_table(experiment)
    assert table["mesh"].startswith(f"data {experiment.mesh.data}")


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("TrainingConfig.step=3", "did you mean 'steps'"),
        ("MeshConfig.tensor=2", "MeshConfig.tensor=2"),
        ("MeshConfig.data=5", "MeshConfig.data=5"),
        ("RolloutConfig.prompt_buckets=(240,)", "row_length=256"),
        ("SamplingConfig.top_k=5", "top_k=5"),
    ],
)
def test_mistakes_are_named(binding, message):
    with pytest.raises(ValueError, match=message):
        load_experiment([str(ROOT / "configs/tiny.gin")], [binding])


def test_dry_run_prints_and_trains_nothing(tmp_path):
    done = launch("train", "--gin_file=configs/tiny.gin", "--dry_run", f"--workdir={tmp_path}")
    assert done.returncode == 0 and "policy parameters" in done.stdout
    assert not list(tmp_path.iterdir())


def test_missing_flag_is_one_line():
    done = launch("train")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: --gin_file is not set")


def test_import_is_light():
    code = (
        "import sys, time; import jax; t = time.time(); import jaxspec; "
        "assert time.time() - t < 0.5; "
        "assert not {'optax', 'orbax', 'matplotlib', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
