"""Reinforcement learning of language models with drafts that learn in the same step.

The names below are imported on first use, so that `import jaxspec` does no work.
"""

import importlib
from typing import Any

_EXPORTS: dict[str, str] = {}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
