"""What this installation can do, line by line, and what to do about the rest."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.compiler import trouble
from fddp.launch import missing_srun, read_launch

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
        found = installed(name)
        yield Finding(name, found or "missing", "" if found else f"pip install {name}")
    yield _unless_it_fails("devices", _devices)
    yield _unless_it_fails("launched as", _launched)
    yield Finding("backend local", "ready: the devices of this process")
    yield Finding("backend gloo", "ready: CPUs of several processes")
    yield Finding("backend mpi", *_mpi())
    yield Finding("launcher", *_launcher())
    yield _unless_it_fails("backend nccl", _nccl)
    yield Finding("fddp.audit(target=…)", "not ready" if trouble() else "ready: a100, h100 and h200", trouble() or "")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    scarce = threads < 2 and "NPROC" not in os.environ
    advice = "with schedule='staged' set NPROC=2, or the traffic waits for the backward pass" if scarce else ""
    yield Finding("cores of this process", str(threads), advice)


def _unless_it_fails(what: str, look: Callable[[], tuple[str, str]]) -> Finding:
    """What was found and what to do; a look that fails must not hide the others."""
    try:
        return Finding(what, *look())
    except Exception as error:  # whatever JAX raises where it finds no device
        asked = os.environ.get("JAX_PLATFORMS", "")
        return Finding(what, "cannot be told", str(error) or f"JAX has no devices; JAX_PLATFORMS is {asked!r}")


def _devices() -> tuple[str, str]:
    devices = jax.local_devices()
    return f"{len(devices)} × {devices[0].device_kind}", _idle_gpus()


def _launched() -> tuple[str, str]:
    launch = read_launch(os.environ)
    return f"rank {launch.rank} of {launch.size}, by {launch.launcher}", missing_srun(launch, os.environ)


def _nccl() -> tuple[str, str]:
    return "ready" if jax.default_backend() not in ("cpu", "tpu") else "no GPU here", ""


def _mpi() -> tuple[str, str]:
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    advice = "pip install 'fddp[mpi]', or mpi4py and mpi4jax beside a system MPI"
    if missing:
        return f"{' and '.join(missing)} missing", advice
    # Built against an MPI that is not here they are installed and yet do not load. Here they would start MPI.
    load = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; import mpi4jax"
    try:
        subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True, timeout=60)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).splitlines()
        return "does not load", f"{said[-1]}; {advice}"
    return "ready", ""


def _launcher() -> tuple[str, str]:
    # An environment's programs lie beside its Python, on the PATH or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    names = sorted(("mpiexec", "mpirun", "srun"), key=lambda name: name != "srun" and "SLURM_JOB_ID" in os.environ)
    start = next((found for name in names if (found := shutil.which(name, path=path))), None)
    return start or "none found", "" if start else "pip install 'fddp[mpi]' brings mpiexec"


def _idle_gpus() -> str:
    """A driver is there and JAX does not use it."""
    if jax.default_backend() == "cpu" and Path("/dev/nvidiactl").exists():
        return "there is an NVIDIA driver: pip install 'jax[cuda13]', and no JAX_PLATFORMS=cpu"
    return ""


def installed(name: str) -> str | None:
    """The version of a package, or None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
