"""What this installation can do, line by line, and what to do about the rest."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.compiler import expect_no_gpu, trouble
from fddp.launch import read_launch

PACKAGES = ("fddp", "jax", "jaxlib", "flax", "optax", "numpy")


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    found: str
    advice: str = ""
    """What to do, where something is missing."""


def examine() -> tuple[Finding, ...]:
    """Looks at versions, devices, launchers and backends of this process.

    Returns:
      The findings; those with advice are worth a look.

    Example:
      >>> examine()[0].what
      'Python'
    """
    return tuple(_findings())


def _findings() -> Iterator[Finding]:
    yield Finding("Python", platform.python_version())
    for name in PACKAGES:
        yield Finding(name, _version(name) or "missing", "" if _version(name) else f"pip install {name}")
    expect_no_gpu()
    devices = jax.local_devices()
    yield Finding("devices", f"{len(devices)} × {devices[0].device_kind}", _idle_gpus())
    launch = read_launch(os.environ)
    yield Finding("launched as", f"rank {launch.rank} of {launch.size}, by {launch.launcher}")
    yield Finding("backend local", "ready: the devices of this process")
    yield Finding("backend gloo", "ready: CPUs of several processes")
    yield from _mpi()
    gpus = jax.default_backend() not in ("cpu", "tpu")
    yield Finding("backend nccl", "ready" if gpus else "no GPU here", "")
    yield Finding("fddp.audit(target=…)", "not ready" if trouble() else "ready: a100, h100 and h200", trouble() or "")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    scarce = threads < 2 and "NPROC" not in os.environ
    advice = "with schedule='staged' set NPROC=2, or the traffic waits for the backward pass" if scarce else ""
    yield Finding("cores of this process", str(threads), advice)


def _mpi() -> Iterator[Finding]:
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    advice = "pip install 'fddp[mpi]', or mpi4py and mpi4jax beside a system MPI"
    found = "ready" if not missing else f"{' and '.join(missing)} missing"
    yield Finding("backend mpi", found, advice if missing else "")
    # An environment's programs lie beside its Python, on the PATH or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    start = next((found for name in ("mpiexec", "mpirun", "srun") if (found := shutil.which(name, path=path))), None)
    yield Finding("launcher", start or "none found", "" if start else "pip install 'fddp[mpi]' brings mpiexec")


def _idle_gpus() -> str:
    """A driver is there and JAX does not use it."""
    if jax.default_backend() == "cpu" and Path("/dev/nvidiactl").exists():
        return "there is an NVIDIA driver: pip install 'jax[cuda13]', and no JAX_PLATFORMS=cpu"
    return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
