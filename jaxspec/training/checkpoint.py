"""Checkpoints: asynchronous, sealed with checksums, restored onto any count of devices.

A checkpoint is a folder `<step>` with the arrays (`state/`, written by orbax) and `seal.json`,
which is written last and in one rename. The seal lists every file with its size and checksum: a
folder without one is the rest of a killed save and is never restored, and a file that was lost,
cut or altered since is named instead of being read.
"""

import concurrent.futures
import errno
import json
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

_SEAL = "seal.json"
_STATE = "state"
# Orbax stores metadata beside the arrays; a small margin keeps the check honest for tiny states.
_SPARE_BYTES = 1 << 20


def abstract_state(state: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


class Checkpoints:
    """The checkpoints of one run.

    Steps are one line of history: saving step s replaces any checkpoint at or beyond s, so a run
    that resumed from an older step never mixes with what came after it. Of the rest, the
    `keep_latest` newest and the `keep_best` with the highest `best_metric` stay.

    Use it as a context manager, or call `wait` before the program ends.

    Args:
      folder: where the checkpoints live; created by the first save.
      keep_latest: newest checkpoints to keep, at least 1.
      keep_best: checkpoints to keep for their `best_metric`, besides the newest.
      best_metric: name of the metric to rank by (higher is better); None with `keep_best` 0.

    Raises:
      ValueError: if the numbers make no sense together.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_latest: int,
        keep_best: int = 0,
        best_metric: str | None = None,
    ):
        if keep_latest < 1:
            raise ValueError(f"keep_latest={keep_latest}; at least 1 checkpoint must be kept")
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best} must not be negative")
        if keep_best and best_metric is None:
            raise ValueError(f"keep_best={keep_best} needs best_metric, the name to rank by")
        self.folder = Path(folder).absolute()
        self.keep_latest, self.keep_best, self.best_metric = keep_latest, keep_best, best_metric
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._cleaned = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the running save and ends the background thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def wait(self) -> None:
        """Waits until the last save is sealed.

        Raises:
          OSError: if that save failed; older checkpoints are then as they were.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts a save; returns once the arrays are copied, so `state` may be donated after.

        Args:
          step: the step the state belongs to.
          state: tree of arrays (flax.struct states, optax states and typed keys too).
          extra: anything that json can hold, given back by `restore`.
          metrics: numbers to rank by; must have `best_metric` where one is set.

        Raises:
          OSError: if the disk has no room for the state, or an earlier save failed.
          ValueError: if `best_metric` is not among the metrics.
          TypeError: if `extra` is not json.
        """
        self.wait()
        metrics = {k: float(v) for k, v in (metrics or {}).items()}
        if self.best_metric is not None and self.best_metric not in metrics:
            raise ValueError(
                f"best_metric={self.best_metric!r} is not among the metrics of step {step}: "
                f"{sorted(metrics)}"
            )
        seal = {
            "step": int(step),
            "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
            "extra": json.loads(json.dumps(dict(extra or {}))),
            "leaves": _leaves(state),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._cleaned:
            self._clean()
            self._cleaned = True
        needed = _num_bytes(state)
        self._check_room(needed)
        path = self._path(step)
        _remove(path)
        path.mkdir()
        try:
            response = ocp.save_async(str(path / _STATE), state)
        except Exception as error:
            raise self._failed(path, needed, error) from error
        self._pending = self._pool.submit(self._finish, path, seal, response, needed)

    def steps(self) -> list[int]:
        """Returns the steps of all sealed checkpoints, ascending."""
        return sorted(self._sealed())

    def latest_step(self) -> int | None:
        """Returns the newest sealed step, or None."""
        return max(self._sealed(), default=None)

    def best_step(self) -> int | None:
        """Returns the sealed step with the highest `best_metric` (the newest of equals), or None.

        Raises:
          ValueError: if no `best_metric` was set.
        """
        if self.best_metric is None:
            raise ValueError("best_step needs Checkpoints(best_metric=...), the name to rank by")
        ranked = self._ranked(self._sealed())
        return ranked[0] if ranked else None

    def restore(self, step: int | None, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the devices that `abstract` names.

        Args:
          step: the step to read; None for the newest that is whole. Damaged or unfinished ones
            passed over on the way are named in a warning each.
          abstract: the tree with a `jax.ShapeDtypeStruct` with a sharding at every leaf (see
            `abstract_state`). The devices may be others, and more or fewer, than those of the save.

        Returns:
          The state, with the types of `abstract`, and the `extra` of the save.

        Raises:
          ValueError: if the checkpoint is missing or damaged (the file is named), or if its
            leaves are not those of `abstract` (the leaf and both shapes are named).
        """
        self.wait()
        if step is not None:
            return self._load(step, abstract)
        steps = sorted(self._folders(), reverse=True)
        for candidate in steps:
            try:
                self._verify(candidate)
            except ValueError as error:
                warnings.warn(
                    f"CHECKPOINT PASSED OVER: {error}. Going back to an older one", stacklevel=2
                )
                continue
            return self._load(candidate, abstract, verified=True)
        raise ValueError(f"no whole checkpoint in {self.folder} (found steps {sorted(steps)})")

    # Paths and seals.

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _folders(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        return {int(p.name): p for p in self.folder.iterdir() if p.name.isdigit() and p.is_dir()}

    def _sealed(self) -> dict[int, dict[str, Any]]:
        seals = {}
        for step, path in self._folders().items():
            try:
                seals[step] = json.loads((path / _SEAL).read_text())
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                # A seal that cannot be read is a damaged checkpoint: restore names it.
                seals[step] = {"metrics": {}}
        return seals

    def _clean(self) -> None:
        """Removes what killed saves left; only a process that saves may do so."""
        for path in self._folders().values():
            if not (path / _SEAL).exists():
                _remove(path)

    def _ranked(self, seals: Mapping[int, dict[str, Any]]) -> list[int]:
        values = {s: seal.get("metrics", {}).get(self.best_metric) for s, seal in seals.items()}
        have = [s for s, v in values.items() if v is not None]
        return sorted(have, key=lambda s: (values[s], s), reverse=True)

    # Saving.

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"no room for a checkpoint in {self.folder}: it needs {needed} bytes and {free} "
                f"are free. Free some space or lower keep_latest={self.keep_latest} or "
                f"keep_best={self.keep_best}; the older checkpoints are untouched",
            )

    def _failed(self, path: Path, needed: int, error: Exception) -> OSError:
        free = shutil.disk_usage(self.folder).free
        _remove(path)
        full = "No space left" in str(error)
        return OSError(
            errno.ENOSPC if full else getattr(error, "errno", None) or errno.EIO,
            f"the checkpoint {path} could not be written ({needed} bytes of state, {free} bytes "
            f"free): {error}. The older checkpoints are untouched",
        )

    def _finish(self, path: Path, seal: dict[str, Any], response: Any, needed: int) -> None:
        try:
            response.result()
            if jax.process_index() != 0:
                return
            _write_seal(path, seal)
        except Exception as error:
            raise self._failed(path, needed, error) from error
        self._thin_out(seal["step"])

    def _thin_out(self, newest: int) -> None:
        seals = self._sealed()
        history = {s: seal for s, seal in seals.items() if s <= newest}
        keep = set(sorted(history)[-self.keep_latest :])
        keep |= set(self._ranked(history)[: self.keep_best])
        for step in sorted(set(seals) - keep):
            _remove(self._path(step))

    # Restoring.

    def _verify(self, step: int) -> dict[str, Any]:
        path = self._path(step)
        if not path.is_dir():
            raise ValueError(f"no checkpoint {path}; sealed steps are {self.steps()}")
        try:
            seal = json.loads((path / _SEAL).read_text())
            files = seal["files"]
        except FileNotFoundError:
            raise ValueError(
                f"{path / _SEAL} is missing: the save of step {step} was cut off"
            ) from None
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path / _SEAL} is torn: it is not a whole json record") from None
        for name, (size, checksum) in files.items():
            file = path / name
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if file.stat().st_size != size:
                raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size}")
            if _checksum(file) != checksum:
                raise ValueError(f"{file} was altered: its checksum is not the one of the save")
        return seal

    def _load(self, step: int, abstract: Any, verified: bool = False) -> tuple[Any, dict[str, Any]]:
        path = self._path(step)
        seal = json.loads((path / _SEAL).read_text()) if verified else self._verify(step)
        _check_leaves(seal["leaves"], abstract, path)
        return ocp.load(str(path / _STATE), abstract), seal["extra"]


def check_workdir(
    workdir: str | os.PathLike[str], fingerprint: Mapping[str, Any], resume: bool
) -> bool:
    """Makes sure that a folder belongs to this experiment, and marks a new one.

    Args:
      workdir: folder of the run; made if there is none.
      fingerprint: the settings that make two runs the same experiment (json, may be nested).
      resume: whether a folder that already holds this experiment may be continued.

    Returns:
      True if the folder already held this experiment, False if it is new.

    Raises:
      ValueError: if the folder holds something else, naming each differing setting, or if it is
        not empty and `resume` is False.
    """
    workdir = Path(workdir)
    marker = workdir / "experiment.json"
    wanted = json.loads(json.dumps(dict(fingerprint)))
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir={workdir} is a file; name a folder")
    if workdir.is_dir() and any(workdir.iterdir()):
        if not resume:
            raise ValueError(
                f"workdir={workdir} is not empty; set resume=True to go on with the run in it, "
                "or name a new folder"
            )
        if not marker.is_file():
            raise ValueError(
                f"workdir={workdir} is not empty and has no {marker.name}: it is not the folder "
                "of a run; name another"
            )
        try:
            present = json.loads(marker.read_text())
        except ValueError:
            raise ValueError(f"{marker} is torn: it is not a whole json record") from None
        differing = _differences(present, wanted)
        if differing:
            raise ValueError(
                f"workdir={workdir} holds another experiment: {'; '.join(differing)}. Name a new "
                "folder, or set these back"
            )
        return True
    workdir.mkdir(parents=True, exist_ok=True)
    _write_text(marker, json.dumps(wanted, indent=1, sort_keys=True))
    return False


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return out


def _differences(present: Any, wanted: Any) -> list[str]:
    old, new = _flat(present), _flat(wanted)
    return [
        f"{name} is {old.get(name, '(unset)')!r} there and {new.get(name, '(unset)')!r} now"
        for name in sorted(old.keys() | new.keys())
        if name not in old or name not in new or old[name] != new[name]
    ]


def _leaves(tree: Any) -> dict[str, list[Any]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [list(x.shape), str(x.dtype)]
        for path, x in flat
    }


def _check_leaves(stored: dict[str, list[Any]], abstract: Any, path: Path) -> None:
    wanted = _leaves(abstract)
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in wanted:
            raise ValueError(f"{path} holds {name}, which the state to restore has not")
        if name not in stored:
            raise ValueError(f"{path} has no {name}, which the state to restore has")
        if stored[name] != wanted[name]:
            (old_shape, old_dtype), (shape, dtype) = stored[name], wanted[name]
            raise ValueError(
                f"{path} holds {name} as {old_dtype}{old_shape} and the state to restore wants "
                f"{dtype}{shape}"
            )
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        if getattr(leaf, "sharding", None) is None:
            name = jax.tree_util.keystr(leaf_path, simple=True, separator=".")
            raise ValueError(f"{name} of the state to restore names no sharding")


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _write_seal(path: Path, seal: dict[str, Any]) -> None:
    files = {
        str(file.relative_to(path)): [file.stat().st_size, _checksum(file)]
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    _write_text(path / _SEAL, json.dumps({**seal, "files": files}))


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as source:
        while block := source.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _remove(path: Path) -> None:
    # The seal goes first: a removal that is cut off leaves an unfinished save, not a torn one.
    (path / _SEAL).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
