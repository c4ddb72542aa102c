"""EAGLE-3 folders and exports that must be refused, by name."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from small_drafts import (
    CONFIG,
    EMBEDDING,
    IDS,
    SHAPES,
    TARGET,
    assert_same,
    load,
    random_weights,
    store,
)

from jaxspec.io import draft_formats
from jaxspec.io.draft_formats import read_eagle3, write_eagle3
from jaxspec.models.config import RopeScaling


def rename(t, old, new):
    t[new] = t.pop(old)


FAULTS = {
    "renamed key": (
        lambda c, t: rename(t, "midlayer.hidden_norm.weight", "midlayer.hnorm.weight"),
        "missing tensor midlayer.hidden_norm.weight; unexpected tensor midlayer.hnorm.weight",
    ),
    "d2t dropped": (lambda c, t: t.pop("d2t"), "missing tensor d2t"),
    "t2d dropped": (lambda c, t: t.pop("t2d"), "missing tensor t2d"),
    "absolute ids": (lambda c, t: t.update(d2t=IDS), "vocabulary of 19; d2t holds offsets"),
    "absolute ids in range": (
        lambda c, t: t.update(d2t=np.arange(0, 14, 2), t2d=np.isin(np.arange(19), IDS)),
        "d2t holds offsets",
    ),
    "offsets of other ids": (
        lambda c, t: t.update(d2t=np.zeros(7, np.int64)),
        "t2d marks 7 ids of which d2t gives 3",
    ),
    "d2t of another dtype": (
        lambda c, t: t.update(d2t=t["d2t"].astype(np.float32)),
        "d2t is float32, expected int64",
    ),
    "head of another vocabulary": (
        lambda c, t: c.update(draft_vocab_size=6),
        r"lm_head.weight is \(7, 10\), config.json says \(6, 10\)",
    ),
    "kernel not transposed": (
        lambda c, t: t.update({"fc.weight": np.ascontiguousarray(t["fc.weight"].T)}),
        r"fc.weight is \(30, 10\), config.json says \(10, 30\)",
    ),
    "integer weights": (
        lambda c, t: t.update({"norm.weight": np.ones(10, np.int64)}),
        "norm.weight is int64",
    ),
    "hidden size": (lambda c, t: c.update(hidden_size=12), "hidden_size=12, .* policy's is 10"),
    "target hidden size": (
        lambda c, t: c.update(target_hidden_size=11),
        "target_hidden_size=11, .* policy's is 10",
    ),
    "vocabulary": (lambda c, t: c.update(vocab_size=20), "vocab_size=20, .* policy's is 19"),
    "layer id": (
        lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
        r"\[1, 3, 8\]; ids must ascend from 0 to 7 for a policy of 8 layers",
    ),
    "layer order": (
        lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[3, 1, 5]),
        "must ascend",
    ),
    "number of layers tapped": (
        lambda c, t: c.update(num_aux_hidden_states=4),
        "num_aux_hidden_states=4",
    ),
    "tied": (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings=True"),
    "no taps": (
        lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state=False",
    ),
    "fc_norm": (lambda c, t: c.update(fc_norm=True), "fc_norm=True"),
    "norm_output": (lambda c, t: c.update(norm_output=True), "norm_output=True"),
    "flag in two places": (
        lambda c, t: c.update(norm_before_fc=True),
        "norm_before_fc=False in eagle_config but True at the top",
    ),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "attention bias": (lambda c, t: c.update(attention_bias=True), "attention_bias=True"),
    "another kind": (
        lambda c, t: c.update(architectures=["DFlashDraftModel"]),
        "architectures \\['DFlashDraftModel'\\]; known are",
    ),
    "another speculator": (
        lambda c, t: c.update(speculators_model_type="dflash"),
        "'dflash' draft of speculators",
    ),
    "own embedding": (
        lambda c, t: t.update({"embed_tokens.weight": EMBEDDING}),
        "give `embedding`",
    ),
    "same key twice": (
        lambda c, t: t.update({"model.norm.weight": t["norm.weight"]}),
        "holds norm.weight twice",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts") / "good"
    write_eagle3(folder, CONFIG, random_weights(CONFIG), TARGET, dtype="float32")
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_files_are_refused_by_name(good, tmp_path, fault):
    mutate, message = FAULTS[fault]
    config, tensors = load(good)
    store(tmp_path / "d", config, tensors)
    read_eagle3(tmp_path / "d", TARGET)  # what is copied is sound
    mutate(config, tensors)
    with pytest.raises(ValueError, match=message):
        read_eagle3(store(tmp_path / "d", config, tensors), TARGET)


def test_absolute_ids_are_seen_without_t2d(good, tmp_path):
    config, tensors = load(good)
    del tensors["t2d"]
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    tensors["d2t"] = np.array([0, 1, 3, 4, 7, 9, 12])
    with pytest.raises(ValueError, match="d2t grows at each of 7 rows"):
        read_eagle3(store(tmp_path / "d", config, tensors), TARGET)


def test_rows_in_another_order_are_sorted(good, tmp_path):
    config, tensors = load(good)
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][order])
    tensors["d2t"] = IDS[order] - np.arange(7)
    _, back = read_eagle3(store(tmp_path / "d", config, tensors), TARGET)
    assert_same(back, random_weights(CONFIG))


def test_embedding_is_left_out_unless_asked_and_compared(tmp_path):
    weights = random_weights(CONFIG)
    write_eagle3(tmp_path / "with", CONFIG, weights, TARGET, include_embedding=EMBEDDING)
    assert load(tmp_path / "with")[1]["embed_tokens.weight"].shape == (19, 10)
    read_eagle3(tmp_path / "with", TARGET, embedding=EMBEDDING)
    with pytest.raises(ValueError, match="away from the policy's embedding"):
        read_eagle3(tmp_path / "with", TARGET, embedding=EMBEDDING + 0.1)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(19, 10\), not \(18, 10\)"):
        read_eagle3(tmp_path / "with", TARGET, embedding=EMBEDDING[:-1])


def test_shards(good, tmp_path):
    config, tensors = load(good)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:6], "b.safetensors": names[6:]}

    def write(parts, index):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for file, held in parts.items():
            safetensors.numpy.save_file({n: tensors[n] for n in held}, tmp_path / file)
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": index}))

    index = {n: f for f, held in parts.items() for n in held}
    write(parts, index)
    assert_same(read_eagle3(tmp_path, TARGET)[1], random_weights(CONFIG))
    write(parts | {"b.safetensors": names[5:]}, index)
    with pytest.raises(ValueError, match=f"twice: {names[5]} in a.safetensors and {names[5]} in b"):
        read_eagle3(tmp_path, TARGET)
    write(parts, {n: f for n, f in index.items() if n != "norm.weight"})
    with pytest.raises(ValueError, match="differ in \\['norm.weight'\\]"):
        read_eagle3(tmp_path, TARGET)
    write(parts, index | {"x": "c.safetensors"})
    with pytest.raises(ValueError, match="lists c.safetensors, which does not exist"):
        read_eagle3(tmp_path, TARGET)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must hold one of"):
        read_eagle3(tmp_path, TARGET)


# --- exports that must be refused


def test_exports_that_fit_nothing_are_refused(tmp_path, monkeypatch):
    weights = random_weights(CONFIG)

    def refused(message, config=CONFIG, weights=weights, target=TARGET, **kwargs):
        with pytest.raises(ValueError, match=message):
            write_eagle3(tmp_path / "d", config, weights, target, **kwargs)
        assert not list(tmp_path.iterdir())

    refused("last id may be 6", dataclasses.replace(CONFIG, tap_layers=(1, 3, 7)))
    refused("policy of 5 layers", target=dataclasses.replace(TARGET, num_layers=5))
    wide = dataclasses.replace(TARGET, hidden_size=12)
    refused("hidden_size=10, .* policy's is 12", target=wide)
    refused("vocab_size=19, .* policy's is 20", target=dataclasses.replace(TARGET, vocab_size=20))
    refused(
        "missing q",
        weights=weights.replace(params={k: v for k, v in weights.params.items() if k != "q"}),
    )
    refused("missing vocab_ids", weights=weights.replace(buffers={}))
    refused(
        "ascending, unique and below vocab_size=19",
        weights=weights.replace(buffers={"vocab_ids": IDS[::-1].astype(np.int32)}),
    )
    big = weights.params | {"norm": np.full(10, 1e6, np.float32)}
    refused(
        "norm of the draft is not finite as float16",
        weights=weights.replace(params=big),
        dtype="float16",
    )
    refused("dtype 'int8'", dtype="int8")
    refused(
        "'dynamic'",
        dataclasses.replace(
            CONFIG,
            rope_scaling=RopeScaling(
                kind="dynamic", factor=2.0, original_max_position_embeddings=64
            ),
        ),
    )
    # A writer that forgets to transpose, or shifts d2t, does not leave a folder behind.
    monkeypatch.setattr(draft_formats, "_is_kernel", lambda name, shape: False)
    monkeypatch.setattr(draft_formats, "_file_shapes", lambda config: SHAPES | {})
    refused("fc.weight is \\(30, 10\\)")
    monkeypatch.undo()
    write_eagle3(tmp_path / "d", CONFIG, weights, TARGET)
    with pytest.raises(ValueError, match="exists and is not empty"):
        write_eagle3(tmp_path / "d", CONFIG, weights, TARGET)


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_eagle3(tmp_path / "d", CONFIG, random_weights(CONFIG), TARGET)
    assert not list(tmp_path.iterdir())
