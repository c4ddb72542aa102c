"""Whole runs of a micro experiment: resume, signals, refusals, what is left behind."""

import dataclasses
import io
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.io.draft_formats import read_eagle3
from jaxspec.io.safetensors import read_policy
from jaxspec.training.batches import build_microbatches
from jaxspec.training.metrics import read_metrics
from jaxspec.training.warm_up import warm_up_to_folder

Optimizer = jaxspec.OptimizerConfig


def micro(**training):
    fields = {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4} | training
    return jaxspec.Experiment(
        name="micro",
        policy=jaxspec.PolicyConfig(
            alphabet="0123456789+-=.,;:? abcdefghijklmnopqrstuvwxyz",
            model=jaxspec.ModelConfig(
                family="llama",
                vocab_size=56,
                hidden_size=32,
                intermediate_size=48,
                num_layers=3,
                num_heads=2,
                num_kv_heads=1,
                head_dim=16,
                tie_word_embeddings=True,
                max_position_embeddings=64,
            ),
            sft=jaxspec.SftConfig(
                steps=12, examples_per_step=16, optimizer=Optimizer(learning_rate=1e-2)
            ),
        ),
        task=jaxspec.SumsTask(terms=2, num_held_out=8),
        training=jaxspec.TrainingConfig(drop_zero_variance=False, **fields),
        rollout=jaxspec.RolloutConfig(
            max_new_tokens=12, batch_size=16, prompt_buckets=(8,), num_draft_tokens=2
        ),
        packing=jaxspec.PackingConfig(row_length=64, rows_per_microbatch=2),
        policy_optimizer=Optimizer(learning_rate=1e-3),
        draft=jaxspec.DraftConfig(
            vocab_size=40,
            optimizer=Optimizer(learning_rate=1e-3),
            warm_up=jaxspec.WarmUpConfig(
                prompts=4,
                samples_per_prompt=4,
                steps=3,
                rows_per_step=2,
                optimizer=Optimizer(learning_rate=1e-3),
            ),
        ),
        evaluation=jaxspec.EvaluationConfig(prompts=8, speed_batch_sizes=(16,), speed_trials=1),
        checkpoint=jaxspec.CheckpointConfig(every=10),
        compute_dtype="float32",
    )


class Interrupting(io.StringIO):
    """A log that sends this process a signal when it reads a certain text."""

    def __init__(self, text, number):
        super().__init__()
        self.text, self.number = text, number

    def write(self, text):
        if self.text in text:
            os.kill(os.getpid(), self.number)
        return super().write(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return jaxspec.train(micro(), folder, operative_config="# settings", stream=io.StringIO())


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("halted")
    stream = Interrupting("step 2/4", signal.SIGTERM)
    result = jaxspec.train(micro(), folder, stream=stream)
    return result, stream.getvalue()


def arrays(result):
    state = result.state.replace(key=jax.random.key_data(result.state.key))
    return [np.asarray(x) for x in jax.tree.leaves((state, result.frozen))]


def test_signal_finishes_the_step_and_saves(halted):
    result, log = halted
    assert result.interrupted and int(result.state.step) == 2
    assert "SIGTERM" in log and "goes on from 2" in log
    assert (result.workdir / "report.html").exists()


def test_resumed_run_is_bit_equal(whole, halted, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(halted[0].workdir, folder)
    resumed = jaxspec.train(micro(), folder, stream=io.StringIO())
    for x, y in zip(arrays(resumed), arrays(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    timed = {"time", "seconds", "tokens_per_second"}
    for a, b in zip(read_metrics(folder), read_metrics(whole.workdir), strict=True):
        assert {k: v for k, v in a.items() if k not in timed} == {
            k: v for k, v in b.items() if k not in timed
        }


def test_resumes_on_other_devices(whole, halted, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(halted[0].workdir, folder)
    wide = dataclasses.replace(micro(), mesh=jaxspec.MeshConfig(data=2))
    resumed = jaxspec.train(wide, folder, stream=io.StringIO())
    for x, y in zip(
        jax.tree.leaves(resumed.state.policy.params),
        jax.tree.leaves(whole.state.policy.params),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_few_programs_are_compiled(whole):
    run = whole.run
    assert run.rl_step._cache_size() == 1
    # The batch of 16 serves 4 prompts x 4 replies and, evaluating, 16 prompts x 1: two prefills.
    assert run.sampler().compilations() == 3
    assert run.sampler(with_draft=False).compilations() == 3


def test_everything_is_left_behind(whole):
    folder = whole.workdir
    config, params = read_policy(folder / "policy")
    np.testing.assert_array_equal(params["embed"], whole.state.policy.params["embed"])
    draft_config, weights = read_eagle3(folder / "draft", config)
    assert draft_config.tap_layers == whole.run.draft.tap_layers
    np.testing.assert_array_equal(weights.params["fc"], whole.state.draft.params["fc"])
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3, 4]
    for name in ("report.html", "summary.png", "rollouts.txt", "operative_config.gin"):
        assert (folder / name).stat().st_size, name
    assert list((folder / "tensorboard").iterdir())
    assert "jax" in json.loads((folder / "versions.json").read_text())
    assert len(whole.evaluations) == 3 and len(whole.speed) == 1


def test_log_probs_of_rollout_and_update_agree(whole):
    for record in whole.records:
        assert record["max_log_ratio"] < 1e-5


def test_used_or_foreign_folders_are_refused(whole):
    with pytest.raises(ValueError, match="not empty"):
        jaxspec.train(micro(), whole.workdir, resume=False, stream=io.StringIO())
    other = dataclasses.replace(micro(), policy_optimizer=Optimizer(learning_rate=2e-3))
    with pytest.raises(ValueError, match="learning_rate"):
        jaxspec.train(other, whole.workdir, stream=io.StringIO())


def test_nonfinite_updates_stop_the_run_with_the_batch_saved(tmp_path, monkeypatch):
    def spoiled(*args, **kwargs):
        made = build_microbatches(*args, **kwargs)
        batch = made.batch.replace(advantages=made.batch.advantages * np.nan)
        return dataclasses.replace(made, batch=batch)

    monkeypatch.setattr("jaxspec.training.collect.build_microbatches", spoiled)
    broken = dataclasses.replace(
        micro(max_nonfinite_in_a_row=2),
        evaluation=jaxspec.EvaluationConfig(prompts=0, speed_trials=0),
    )
    with pytest.raises(ValueError, match="2 updates in a row"):
        jaxspec.train(broken, tmp_path / "run", stream=io.StringIO())
    assert list((tmp_path / "run").glob("nonfinite_batch_*.pkl"))


def test_stored_models_train_on_with_a_reference_and_two_updates_in_bfloat16(whole, tmp_path):
    stored = micro(steps=2)
    stored = dataclasses.replace(
        stored,
        training=dataclasses.replace(stored.training, updates_per_step=2),
        policy=jaxspec.PolicyConfig(source=str(whole.workdir / "policy")),
        draft=dataclasses.replace(
            stored.draft, source=str(whole.workdir / "draft"), warm_up=None, update_every=2
        ),
        step=jaxspec.StepConfig(loss=jaxspec.LossConfig(kl_coefficient=0.1, on_policy=False)),
        evaluation=jaxspec.EvaluationConfig(prompts=0, speed_trials=0),
        compute_dtype="bfloat16",
    )
    result = jaxspec.train(stored, tmp_path, stream=io.StringIO())
    # Two updates a step; the policy leaves its reference, the frozen draft is the stored one.
    assert int(result.state.step) == 2
    counts = [x for x in jax.tree.leaves(result.state.policy.opt_state) if x.shape == ()]
    assert {int(x) for x in counts} == {4}
    assert 0 < result.records[0]["kl_reference"] < result.records[1]["kl_reference"]
    np.testing.assert_array_equal(result.frozen.params["fc"], whole.state.draft.params["fc"])
    assert not np.array_equal(result.state.draft.params["fc"], whole.state.draft.params["fc"])
    assert result.records[0]["ratio"] != 1


def test_draft_is_fitted_to_texts_and_stored(whole, tmp_path):
    stored = dataclasses.replace(
        micro(), policy=jaxspec.PolicyConfig(source=str(whole.workdir / "policy"))
    )
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "1+2=", "reply": "3"}\n{"prompt": "4+1=", "reply": "so 5"}\n')
    fitted = warm_up_to_folder(stored, str(tmp_path / "draft"), str(texts))
    config, weights = read_eagle3(tmp_path / "draft", whole.run.model)
    assert config.draft_vocab_size == 40 and len(fitted.history) == 3
    np.testing.assert_array_equal(weights.params["fc"], fitted.weights.params["fc"])
    with pytest.raises(ValueError, match="not empty"):
        warm_up_to_folder(stored, str(tmp_path / "draft"))
