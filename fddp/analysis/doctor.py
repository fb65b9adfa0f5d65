"""Reports what this installation can do, line by line, and what to do about the rest."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.analysis.reproduction import CALLS, ONE_THREAD, small_gradient
from fddp.jax_internals import cache_small_programs, compilation_cache
from fddp.runtime import hints, missing_compiler, mpi_vendors, read_launch, spoken

PACKAGES = ("fddp", "jax", "jaxlib", "flax", "optax", "numpy")


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    found: str
    advice: str = ""
    """Advice, where something is missing."""


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
    said = spoken(os.environ)
    yield Finding("launchers' variables", " ".join(f"{name}={value}" for name, value in said.items()) or "none")
    if said:
        yield _unless_it_fails("rank 0 is met at", _meeting)
    yield Finding("backend local", "ready: the devices of this process")
    yield Finding("backend gloo", "ready: CPUs of several processes")
    *found, vendor = _mpi()
    yield Finding("backend mpi", *found)
    yield Finding("launcher", *_launcher(vendor))
    yield _unless_it_fails("backend nccl", _nccl)
    missing = missing_compiler()
    yield Finding("fddp.audit(target=…)", "not ready" if missing else "ready: a100, h100 and h200", missing or "")
    yield _unless_it_fails("same bits each time", _bits)
    yield Finding("compilation cache", _cache())
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    scarce = threads < 2 and "NPROC" not in os.environ
    advice = "with schedule='staged' set NPROC=2, or the traffic waits for the backward pass" if scarce else ""
    yield Finding("cores of this process", str(threads), advice)


def _unless_it_fails(what: str, look: Callable[[], tuple[str, str]]) -> Finding:
    """Looks, and reports an error as a finding: a look that fails must not hide the others."""
    try:
        return Finding(what, *look())
    except Exception as error:  # whatever JAX raises where it finds no device
        asked = os.environ.get("JAX_PLATFORMS", "")
        return Finding(what, "cannot be told", str(error) or f"JAX has no devices; JAX_PLATFORMS is {asked!r}")


def _cache() -> str:
    folder = compilation_cache()
    limit = cache_small_programs()
    return f"{folder}, of programs that take {limit:g} s or longer" if folder else "none: JAX_COMPILATION_CACHE_DIR"


def _devices() -> tuple[str, str]:
    devices = jax.local_devices()
    return f"{len(devices)} × {devices[0].device_kind}", _idle_gpus()


def _launched() -> tuple[str, str]:
    launch = read_launch(os.environ)
    return f"rank {launch.rank} of {launch.size}, by {launch.launcher}", " ".join(hints(launch, os.environ))


def _meeting() -> tuple[str, str]:
    launch = read_launch(os.environ)
    if launch.coordinator or launch.size == 1:
        return launch.coordinator or "nowhere: there is no other", ""
    if launch.by_mpi:
        return "a place that is agreed on over MPI", ""
    return "nowhere", "set FDDP_COORDINATOR=host:port of rank 0, equal on all ranks"


def _bits() -> tuple[str, str]:
    found = small_gradient()
    told = f"{CALLS} calls of a compiled gradient gave {found} result{'s' * (found > 1)}"
    return told, f"virtual_replicas cannot promise equal bits here. {ONE_THREAD}" if found > 1 else ""


def _nccl() -> tuple[str, str]:
    return "ready" if jax.default_backend() not in ("cpu", "tpu") else "no GPU here", ""


def _mpi() -> tuple[str, str, str | None]:
    """Looks for MPI: returns the finding, the advice, and the vendor of mpi4py's MPI."""
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    if missing:
        words = " ".join([*mpi_vendors.without_cuda(), "pip install"])
        how = f"pip install mpich where there is no system MPI, then {words} {' '.join(missing)}"
        return f"{' and '.join(missing)} missing", how, None
    # Packages that were built against an MPI that is not here are installed and yet do not load.
    vendor, problem = mpi_vendors.loaded()
    if vendor is None:
        return "does not load", f"{problem}; mpi4py finds no MPI: pip install mpich, or install a system MPI", None
    if problem:
        return "does not load", f"{problem}: {mpi_vendors.rebuild(vendor)}", vendor
    return f"ready: {vendor}", "", vendor


def _launcher(vendor: str | None) -> tuple[str, str]:
    """The launcher to take, and what is wrong with the one that comes first on the PATH."""
    srun = shutil.which("srun")
    if srun and "SLURM_JOB_ID" in os.environ:
        return srun, ""
    found = list(mpi_vendors.launchers(vendor))
    if not found:
        return srun or "none found", "" if srun else "pip install mpich brings mpiexec"
    start, its = found[0]
    typed = shutil.which("mpiexec")
    known = dict(found)
    if vendor and its != vendor:
        return f"{start} ({its or 'whose?'})", f"mpi4py has {vendor}, whose mpiexec is not here: install it"
    if vendor and typed and known.get(typed) != vendor:
        return start, f"mpi4py has {vendor}; plain mpiexec is {typed}, of {known.get(typed) or 'another MPI'}"
    return start, ""


def _idle_gpus() -> str:
    """Advice where there is a driver that JAX does not use."""
    if jax.default_backend() == "cpu" and Path("/dev/nvidiactl").exists():
        return "there is an NVIDIA driver: pip install 'jax[cuda13]', and no JAX_PLATFORMS=cpu"
    return ""


def installed(name: str) -> str | None:
    """The version of a package, or None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
