"""Eight CPU devices, warnings as errors, and shape checks on every public function."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Nearly all of a test's time is compilation, and nothing here is timed.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("jaxspec", "beartype.beartype")
