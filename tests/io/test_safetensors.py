"""Hugging Face folders: weights in and out, and every refusal."""

import errno
import json
import struct
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small_policies import FAMILIES, config_of, random_params

from jaxspec.io import safetensors as st
from jaxspec.models.blocks import rope_frequencies


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def raw_tensors(folder):
    """Reads a folder with the safetensors library alone."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="np") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


def rewrite(folder, change, file="model.safetensors"):
    """Lets `change` edit the tensors of a file, and writes them back with the library."""
    tensors = safetensors.numpy.load_file(folder / file)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / file)


def edit_json(path, **changes):
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


# Weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 700])
def test_round_trip_is_exact(family, max_shard_bytes, tmp_path):
    config = config_of(family)
    params = random_params(config)
    device = jax.tree.map(jax.numpy.asarray, params)
    given = params if max_shard_bytes == 700 else device
    folder = st.write_policy(
        tmp_path / "x" / family, config, given, dtype="float32", max_shard_bytes=max_shard_bytes
    )
    shards = sorted(f.name for f in folder.glob("*.safetensors"))
    assert (len(shards) > 4) == (max_shard_bytes == 700)
    again, loaded = st.read_policy(folder)
    assert again == config
    assert_equal(loaded, params)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    if len(shards) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == shards
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))


def test_names_and_orientation(folder):
    _, params = st.read_policy(folder)
    raw = raw_tensors(folder)
    np.testing.assert_array_equal(
        raw["model.layers.2.mlp.down_proj.weight"], params["layers"]["down"][2].T
    )
    np.testing.assert_array_equal(raw["lm_head.weight"], params["lm_head"])
    np.testing.assert_array_equal(
        raw["model.layers.1.post_attention_layernorm.weight"], params["layers"]["mlp_norm"][1]
    )
    assert len(raw) == 3 + 3 * 9


def test_heads_keep_their_index(tmp_path):
    """8 query heads over 2 key heads, each filled with its own index."""
    config = config_of("qwen2")
    params = random_params(config)
    width = config.head_dim
    q_index, kv_index = np.repeat(np.arange(8.0), width), np.repeat(np.arange(2.0), width)
    for name, index in (("q", q_index), ("k", kv_index), ("v", kv_index)):
        params["layers"][name][:] = index
        params["layers"][f"{name}_bias"][:] = index
    params["layers"]["o"][:] = q_index[:, None]
    folder = st.write_policy(tmp_path / "p", config, params, dtype="bfloat16")
    raw = {k: v.astype(np.float32) for k, v in raw_tensors(folder).items()}
    for head in range(8):
        rows = slice(head * width, (head + 1) * width)
        assert (raw["model.layers.1.self_attn.q_proj.weight"][rows] == head).all()
        assert (raw["model.layers.1.self_attn.o_proj.weight"][:, rows] == head).all()
    for head in range(2):
        rows = slice(head * width, (head + 1) * width)
        assert (raw["model.layers.1.self_attn.v_proj.weight"][rows] == head).all()
        assert (raw["model.layers.1.self_attn.k_proj.bias"][rows] == head).all()
    layers = st.read_policy(folder)[1]["layers"]
    for name in ("q", "k", "v", "o"):
        np.testing.assert_array_equal(layers[name], params["layers"][name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_once(dtype, tmp_path):
    config = config_of()
    params = random_params(config)
    folder = st.write_policy(tmp_path / "p", config, params, dtype=dtype)
    target = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    assert raw_tensors(folder)["model.norm.weight"].dtype == target
    expected = jax.tree.map(lambda x: x.astype(target).astype(np.float32), params)
    assert_equal(st.read_policy(folder)[1], expected)


def test_values_that_overflow_are_refused(tmp_path):
    config = config_of()
    params = random_params(config)
    params["layers"]["gate"][1, 2, 3] = 1e5
    with pytest.raises(ValueError, match="layers.1.mlp.gate_proj.weight is not finite as float16"):
        st.write_policy(tmp_path / "p", config, params, dtype="float16")
    assert not list(tmp_path.iterdir())
    st.write_policy(tmp_path / "p", config, params, dtype="bfloat16")


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    config = config_of()
    write, written = st._write, []

    def fails_at_third(path, chunks):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, chunks)

    monkeypatch.setattr(st, "_write", fails_at_third)
    with pytest.raises(OSError, match="No space left"):
        st.write_policy(tmp_path / "p", config, random_params(config), max_shard_bytes=500)
    assert len(written) == 2 and not list(tmp_path.iterdir())


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    config = config_of(num_layers=24, hidden_size=64, intermediate_size=256, vocab_size=256)
    params = random_params(config)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    tracemalloc.start()
    st.write_policy(tmp_path / "p", config, params, dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < total / 8


def test_tokenizer_files_go_along(tmp_path):
    config = config_of()
    files = {"tokenizer.json": "{}", "spiece.model": b"\x00\x01"}
    folder = st.write_policy(tmp_path / "p", config, random_params(config), tokenizer_files=files)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "spiece.model").read_bytes() == b"\x00\x01"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"tokenizer_files": {"config.json": "{}"}}, "cannot be called 'config.json'"),
        ({"tokenizer_files": {"../evil": "{}"}}, "cannot be called '../evil'"),
        ({"params": {"embed": np.zeros((2, 2), np.float32)}}, "missing final_norm"),
        ({"config": config_of(qkv_bias=True)}, "missing layers.q_bias"),
    ],
)
def test_writing_refuses(changes, message, tmp_path):
    config = config_of()
    settings = {"config": config, "params": random_params(config)} | changes
    with pytest.raises(ValueError, match=message):
        st.write_policy(tmp_path / "p", **settings)
    assert not list(tmp_path.iterdir())


def test_writing_refuses_a_folder_in_use(folder):
    config = config_of()
    before = sorted(f.name for f in folder.iterdir())
    with pytest.raises(ValueError, match="exists and is not empty"):
        st.write_policy(folder, config, random_params(config))
    assert sorted(f.name for f in folder.iterdir()) == before


def test_tied_head_is_checked(tmp_path):
    config = config_of("qwen2")
    params = random_params(config)
    folder = st.write_policy(tmp_path / "p", config, params, dtype="float32")
    rewrite(folder, lambda t: t.update({"lm_head.weight": params["embed"].copy()}))
    assert_equal(st.read_policy(folder)[1], params)
    rewrite(folder, lambda t: t["lm_head.weight"].__setitem__((3, 4), 9.0))
    with pytest.raises(ValueError, match="tie_word_embeddings is true but lm_head.weight"):
        st.read_policy(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": params["embed"][:6].copy()}))
    with pytest.raises(ValueError, match=r"lm_head.weight \(6, 10\) differs.*\(12, 10\)"):
        st.read_policy(folder)


def test_rotary_buffer_is_checked(folder):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    freqs = rope_frequencies(4, 10000.0, None)[0].astype(np.float16)
    rewrite(folder, lambda t: t.update({name: freqs}))
    st.read_policy(folder)
    rewrite(folder, lambda t: t.update({name: freqs / 2}))
    with pytest.raises(ValueError, match="inv_freq is not that of rope_theta=10000"):
        st.read_policy(folder)


Q = "model.layers.1.self_attn.q_proj.weight"
REFUSED = {
    "missing": (lambda t: t.pop(Q), f"missing tensor {Q}"),
    "renamed": (lambda t: t.update({"q.weight": t.pop(Q)}), f"missing tensor {Q}; unexpected"),
    "unexpected": (
        lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.ones((6, 10), np.float32)}),
        "unexpected tensor model.layers.3.mlp.up_proj.weight",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
        "unexpected tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda t: t.update({Q: np.ascontiguousarray(t[Q].T)}),
        rf"tensor {Q} has shape \(10, 32\), the configuration says \(32, 10\)",
    ),
    "padded": (
        lambda t: t.update({"model.embed_tokens.weight": np.ones((16, 10), np.float32)}),
        r"model.embed_tokens.weight has shape \(16, 10\), the configuration says \(12, 10\)",
    ),
    "dtype": (lambda t: t.update({Q: t[Q].astype(np.int8)}), f"{Q} has dtype I8; readable are"),
    "many": (lambda t: t.clear(), r"\(and 22 more\)"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_reading_refuses(fault, folder):
    change, message = REFUSED[fault]
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        st.read_policy(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("keep", [4, 300, -1])
def test_reading_refuses_a_cut_file(keep, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ValueError, match="model.safetensors is cut short") as caught:
        st.read_policy(folder)
    if keep == -1:
        size = len(data)
        assert f"mlp.down_proj.weight ends at byte {size}, the file at {size - 1}" in str(
            caught.value
        )


def test_reading_refuses_other_files(folder):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 8) + b"notjson!")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        st.read_policy(folder)
    file.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        st.read_policy(folder)


def test_reading_names_a_broken_layout(folder):
    """A gap after the last tensor, which only the library's own check sees."""
    with open(folder / "model.safetensors", "ab") as stream:
        stream.write(b"more")
    with pytest.raises(ValueError, match="model.safetensors is broken"):
        st.read_policy(folder)


@pytest.fixture
def sharded(tmp_path):
    config = config_of()
    return st.write_policy(
        tmp_path / "s", config, random_params(config), dtype="float32", max_shard_bytes=4000
    )


def test_shards_must_agree_with_their_index(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    first, second = files[:2]
    name = next(n for n, f in index["weight_map"].items() if f == first)
    st.read_policy(sharded)

    other = (sharded / second).read_bytes()
    value = safetensors.numpy.load_file(sharded / first)[name]
    rewrite(sharded, lambda t: t.update({name: value}), second)
    with pytest.raises(ValueError, match=f"tensor {name} is in both .*{first} and .*{second}"):
        st.read_policy(sharded)
    rewrite(sharded, lambda t: t.pop(name), first)
    with pytest.raises(ValueError, match=f"puts {name} in {first}, but it is in {second}"):
        st.read_policy(sharded)
    (sharded / second).write_bytes(other)
    with pytest.raises(ValueError, match=f"puts {name} in {first}, but it is in None"):
        st.read_policy(sharded)
    rewrite(sharded, lambda t: t.update({name: value, "extra": value}), first)
    with pytest.raises(ValueError, match=f"puts extra in None, but it is in {first}"):
        st.read_policy(sharded)
    (sharded / second).unlink()
    with pytest.raises(ValueError, match=f"lists {second}, which does not exist"):
        st.read_policy(sharded)
    (sharded / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds both model.safetensors and"):
        st.read_policy(sharded)


def test_ids_of_generation_config_win(folder):
    edit_json(folder / "config.json", eos_token_id=2, pad_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=[7, 5], pad_token_id=4)
    config = st.read_config(folder)
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((7, 5), 4, 1)
    (folder / "generation_config.json").unlink()
    assert st.read_config(folder).eos_token_ids == (2,)


def test_unreadable_configuration(folder, tmp_path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        st.read_policy(folder)
    with pytest.raises(ValueError, match="config.json does not exist"):
        st.read_policy(tmp_path)
