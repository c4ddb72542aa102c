"""What a run was made with: versions, devices and the machine, for the report."""

import importlib.metadata
import os
import platform

import jax

_PACKAGES = {
    "jaxspec": "jaxspec",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "numpy": "numpy",
}


def versions() -> dict[str, str]:
    """Returns the versions, devices and machine of this process, ready to print.

    Package versions are read from their metadata, so nothing is imported for them.
    """
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    devices = jax.devices()
    found["platform"] = f"{platform.system()} {platform.machine()}"
    kind = devices[0].device_kind
    found["devices"] = f"{len(devices)} \N{MULTIPLICATION SIGN} {kind}"
    found["backend"] = devices[0].platform
    found["processes"] = str(jax.process_count())
    found["cores"] = str(_cores())
    memory = _memory()
    found["memory"] = f"{memory / 2**30:.1f} GiB" if memory else "unknown"
    return found


def _cores() -> int:
    # Affinity counts what this process may use, where the system tells.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
