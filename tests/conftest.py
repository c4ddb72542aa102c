"""Eight CPU devices, warnings as errors, and shape checks on every public function."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Nearly all of a test's time is compilation, and nothing here is timed.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Runs of one experiment compile the same programs; workers and subprocesses inherit the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxspec-test-cache-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("jaxspec", "beartype.beartype")
