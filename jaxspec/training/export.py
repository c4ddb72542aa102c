"""Writing what was trained in the forms that others load."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import DraftWeights
from jaxspec.io.draft_formats import write_eagle3
from jaxspec.io.safetensors import write_policy
from jaxspec.training.setup import Run

POLICY_FOLDER, DRAFT_FOLDER = "policy", "draft"


def export(
    run: Run, folder: Path, policy_params: Any, draft_weights: DraftWeights | None
) -> list[Path]:
    """Writes the policy as a Hugging Face folder and the draft as an EAGLE-3 folder.

    Args:
      run: the run.
      folder: parent of both folders.
      policy_params: the trained policy.
      draft_weights: the trained draft, or None.

    Returns:
      The folders written.
    """
    target = folder / POLICY_FOLDER
    host = jax.tree.map(np.asarray, policy_params)
    write_policy(target, run.model, host, dtype="float32")
    run.tokenizer.save(target)
    written = [target]
    if draft_weights is not None:
        host = jax.tree.map(np.asarray, draft_weights)
        write_eagle3(folder / DRAFT_FOLDER, run.draft.config, host, run.model, dtype="float32")
        written.append(folder / DRAFT_FOLDER)
    return written
