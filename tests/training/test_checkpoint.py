import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import compat
from jaxspec.training import checkpoint as checkpoint_lib
from jaxspec.training.checkpoint import Checkpoints, abstract_state, check_workdir


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt: optax.OptState
    key: jax.Array


def make_state(num_devices: int, seed: int = 0) -> State:
    mesh = compat.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    rng = np.random.default_rng(seed)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    params = {
        "w": jax.device_put(rng.normal(size=(8, 6)).astype(np.float32), rows),
        "b": jax.device_put(rng.normal(size=4).astype(jnp.bfloat16), whole),
    }

    def scaled(factor):
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x) * factor, x.sharding), params)

    count = jax.device_put(np.int32(seed), whole)
    opt = (optax.ScaleByAdamState(count=count, mu=scaled(2), nu=scaled(3)), optax.EmptyState())
    key = jax.device_put(jax.random.key(seed), whole)
    return State(step=jax.device_put(np.int32(seed), whole), params=params, opt=opt, key=key)


def as_numpy(state: State):
    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(x))
        return np.asarray(x).copy()

    return jax.tree.map(one, state)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("num_devices", [8, 4, 1])
def test_restore_is_bit_equal_onto_any_count_of_devices(tmp_path, num_devices):
    state = make_state(8, seed=3)
    extra = {"order": [3, 1, 2], "name": "run", "nested": {"none": None, "empty": {}}}
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(3, state, extra)
    wanted = abstract_state(make_state(num_devices))
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        restored, extra_back = checkpoints.restore(None, wanted)
    assert_same(as_numpy(restored), as_numpy(state))
    assert extra_back == extra
    assert isinstance(restored.opt[0], optax.ScaleByAdamState)
    assert restored.params["w"].sharding.num_devices == num_devices
    assert int(jax.random.bits(restored.key)) == int(jax.random.bits(state.key))


def test_a_state_donated_right_after_the_save_is_saved_as_it_was(tmp_path):
    state = make_state(1, seed=1).replace(key=jnp.zeros(2, jnp.uint32))
    before = as_numpy(state)
    wanted = abstract_state(state)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, state)
        advance(state)
        assert state.params["w"].is_deleted()
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, wanted)
    assert_same(as_numpy(restored), before)


def test_keeps_the_newest_and_the_best(tmp_path):
    state = make_state(1)
    rewards = {1: 0.1, 2: 0.9, 3: 0.5, 4: float("nan"), 5: 0.4, 6: 0.3}
    with Checkpoints(tmp_path, keep_latest=2, keep_best=1, best_metric="reward") as checkpoints:
        for step, reward in rewards.items():
            checkpoints.save(step, state, metrics={"reward": reward})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.latest_step() == 6 and checkpoints.best_step() == 2
        # A save in the past discards what came after it.
        checkpoints.save(5, state, metrics={"reward": 0.0})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5]
        with pytest.raises(ValueError, match="'reward' is not among.*loss"):
            checkpoints.save(7, state, metrics={"loss": 1.0})


@pytest.mark.parametrize("fault", ["delete", "cut", "flip", "seal"])
def test_a_damaged_file_is_named_and_the_last_good_checkpoint_used(tmp_path, fault):
    states = {step: make_state(1, seed=step) for step in (1, 2)}
    with Checkpoints(tmp_path, keep_latest=2) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state)
        checkpoints.wait()
        folder = tmp_path / "00000002"
        files = sorted(
            (f for f in folder.rglob("*") if f.is_file()), key=lambda f: -f.stat().st_size
        )
        victim = folder / "seal.json" if fault == "seal" else files[0]
        content = bytearray(victim.read_bytes())
        if fault == "delete":
            victim.unlink()
        elif fault == "flip":
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        else:
            victim.write_bytes(content[: len(content) // 2])
        wanted = abstract_state(states[1])
        with pytest.raises(ValueError, match=f"{victim}"):
            checkpoints.restore(2, wanted)
        with pytest.warns(UserWarning, match=f"PASSED OVER.*{victim}"):
            restored, _ = checkpoints.restore(None, wanted)
    assert_same(as_numpy(restored), as_numpy(states[1]))


def test_every_file_of_a_checkpoint_is_under_the_seal(tmp_path):
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, make_state(1))
    folder = tmp_path / "00000001"
    sealed = set(json.loads((folder / "seal.json").read_text())["files"])
    present = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert present - sealed == {"seal.json"}


def test_a_state_of_other_shapes_is_named(tmp_path):
    state = make_state(1)
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        wanted = abstract_state(state)
        w = wanted.params["w"]
        other = jax.ShapeDtypeStruct((8, 7), w.dtype, sharding=w.sharding)
        with pytest.raises(ValueError, match=r"params\.w as float32\[8, 6\].*float32\[8, 7\]"):
            checkpoints.restore(1, wanted.replace(params={**wanted.params, "w": other}))
        other = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=w.sharding)
        with pytest.raises(ValueError, match=r"params\.w as float32.*bfloat16"):
            checkpoints.restore(1, wanted.replace(params={**wanted.params, "w": other}))
        with pytest.raises(ValueError, match=r"holds params\.b"):
            checkpoints.restore(1, wanted.replace(params={"w": w}))
        with pytest.raises(ValueError, match="names no sharding"):
            checkpoints.restore(
                1, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
            )
        with pytest.raises(ValueError, match=r"no checkpoint .*00000009; sealed steps are \[1\]"):
            checkpoints.restore(9, wanted)


def test_a_full_disk_is_named_and_leaves_older_checkpoints(tmp_path, monkeypatch):
    state = make_state(1)
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        usage = checkpoint_lib.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(
            checkpoint_lib.shutil, "disk_usage", lambda _: usage._replace(free=1000)
        )
        with pytest.raises(OSError, match=f"{tmp_path}.*needs [0-9]+ bytes and 1000 are free"):
            checkpoints.save(2, state)
        monkeypatch.undo()

        class FillsUp:
            """The disk fills up while the arrays are being written."""

            def __init__(self, path, tree):
                self.path = Path(path)

            def result(self):
                self.path.mkdir()
                (self.path / "half").write_bytes(b"half")
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint_lib.ocp, "save_async", FillsUp)
        checkpoints.save(2, state)
        with pytest.raises(OSError, match="00000002 could not be written.*No space left"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


_SAVES_IN_A_LOOP = """
import sys
import jax, numpy as np
from jaxspec.training.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep_latest=2)
for step in range(1, 100000):
    checkpoints.save(step, {"w": jax.numpy.full((64, 1024), step, "float32")}, {"step": step})
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_good_one(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _SAVES_IN_A_LOOP, str(tmp_path)])
    try:
        # Kill while a folder without a seal is there: in the middle of a save.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            folders = [p for p in tmp_path.iterdir() if p.name.isdigit() and int(p.name) > 2]
            if any(not (p / "seal.json").exists() for p in folders):
                break
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    unsealed = [p for p in Path(tmp_path).iterdir() if not (p / "seal.json").exists()]
    one = jax.device_put(np.zeros((64, 1024), np.float32), jax.devices()[0])
    with Checkpoints(tmp_path, keep_latest=2) as checkpoints:
        last = checkpoints.latest_step()
        assert last is not None and last >= 1
        if any(int(p.name) > last for p in unsealed):
            with pytest.warns(UserWarning, match="PASSED OVER.*cut off"):
                state, extra = checkpoints.restore(None, abstract_state({"w": one}))
        else:
            state, extra = checkpoints.restore(None, abstract_state({"w": one}))
        assert extra == {"step": last}
        np.testing.assert_array_equal(state["w"], np.full((64, 1024), last, np.float32))
        checkpoints.save(last + 1, {"w": one})
        checkpoints.wait()
        assert all((p / "seal.json").exists() for p in tmp_path.iterdir())
        assert checkpoints.latest_step() == last + 1


def test_only_a_save_clears_what_a_killed_one_left(tmp_path):
    left = tmp_path / "00000007" / "state.partial"
    left.mkdir(parents=True)
    (left / "arrays").write_bytes(b"half")
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        assert checkpoints.latest_step() is None and left.exists()
        checkpoints.save(1, make_state(1))
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_a_removal_that_is_cut_off_leaves_no_torn_checkpoint(tmp_path, monkeypatch):
    state = make_state(1)
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        monkeypatch.setattr(checkpoint_lib.shutil, "rmtree", lambda *_, **__: None)
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="keep_latest=0"):
        Checkpoints(tmp_path, keep_latest=0)
    with pytest.raises(ValueError, match="best_metric"):
        Checkpoints(tmp_path, keep_latest=1, keep_best=2)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        Checkpoints(tmp_path / "none", keep_latest=1).restore(None, {})


def test_a_workdir_belongs_to_one_experiment(tmp_path):
    folder = tmp_path / "run"
    settings = {"seed": 1, "model": {"layers": 2, "taps": (1, 2)}}
    assert check_workdir(folder, settings, resume=False) is False
    assert check_workdir(folder, settings, resume=True) is True
    with pytest.raises(ValueError, match="not empty; set resume=True"):
        check_workdir(folder, settings, resume=False)
    other = {"seed": 2, "model": {"layers": 2, "taps": (1, 3)}, "new": 1}
    with pytest.raises(ValueError, match="another experiment") as error:
        check_workdir(folder, other, resume=True)
    message = str(error.value)
    assert "seed is 1 there and 2 now" in message
    assert "model.taps is [1, 2] there and [1, 3] now" in message
    assert "new is '(unset)' there and 1 now" in message
    assert "layers" not in message
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="has no experiment.json"):
        check_workdir(tmp_path, settings, resume=True)
