"""Reports the abilities of this installation, and advice for the missing ones."""

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.comm import library
from fddp.jax_internals import cache_small_programs, compilation_cache
from fddp.runtime import (
    cores_for,
    fddp_version,
    hint,
    installed,
    is_of_this_host,
    known_faults,
    launcher_variables,
    missing_compiler,
    mpi_vendors,
    proxies,
    read_launch,
)

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


class ReportLine(NamedTuple):
    """A line of the report."""

    what: str
    found: str
    advice: str = ""
    """Advice if something is missing, else empty."""


def examine() -> Iterator[ReportLine]:
    """Looks at the installation and at this process, line by line."""
    yield ReportLine("Python", platform.python_version())
    yield ReportLine("fddp", fddp_version())
    for name in PACKAGES:
        if status := installed(name):
            yield ReportLine(name, status)
        else:
            yield ReportLine(name, "missing", f"pip install {name}")
    yield from _faults()
    yield _unless_it_fails("devices", _devices)
    yield _unless_it_fails("launched as", _launched)
    variables = launcher_variables(os.environ)
    texts = map("=".join, variables.items())
    yield ReportLine("launchers' variables", " ".join(texts) or "none")
    if variables:
        yield _unless_it_fails("rank 0 is met at", _meeting)
    yield ReportLine("backend local", "ready: the devices of this process")
    past = ", past ".join(["ready: CPUs of several processes", *proxies(os.environ)])
    yield ReportLine("backend gloo", past, _name_advice(socket.gethostname()))
    *status, vendor = _mpi()
    yield ReportLine("backend mpi", *status)
    lane = ("travel between programs", "install a C++ compiler (g++), then build fddp again")
    if library():
        lane = ("travel while a step's one program computes", "")
    yield ReportLine("messages between CPUs", *lane)
    yield ReportLine("launcher", *_launcher(vendor))
    yield _unless_it_fails("backend nccl", _nccl)
    status = ("ready: a100, h100 and h200", "")
    if missing := missing_compiler():
        status = ("not ready", missing)
    yield ReportLine("fddp.audit(target=…)", *status)
    yield ReportLine("compilation cache", _cache())
    yield _unless_it_fails("cores of this process", _cores)


def _unless_it_fails(topic: str, look: Callable[[], tuple[str, str]]) -> ReportLine:
    """Returns the finding of `look`, or its error as a finding: later lines must still appear."""
    try:
        return ReportLine(topic, *look())
    except Exception as error:  # JAX raises several types if it has no device
        no_devices = f"JAX has no devices; JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}"
        return ReportLine(topic, "unknown", str(error) or no_devices)


def _cache() -> str:
    folder = compilation_cache()
    limit = cache_small_programs()
    if not folder:
        return "none: JAX_COMPILATION_CACHE_DIR"
    return f"{folder}, of programs that take {limit:g} s or longer"


def _faults() -> Iterator[ReportLine]:
    for fault in known_faults(installed("jaxlib") or "", os.environ.get("XLA_FLAGS", "")):
        cures = [f"jaxlib {fault.end}"] if fault.end else []
        if fault.flag:
            cures.append(f"XLA_FLAGS={fault.flag}")
        advice = f"{' or '.join(cures)}; see github.com/{fault.source.replace('#', '/issues/', 1)}"
        yield ReportLine("fault on CPUs", f"{fault.kind}: {fault.program}", advice)


def _name_advice(name: str) -> str:
    if is_of_this_host(name):
        return ""
    return (
        f"the name {name!r} of this host does not lead to an address of this host: fddp.init needs "
        f"no name, but a jax.distributed of your own needs a line such as '127.0.1.1 {name}' in "
        "/etc/hosts"
    )


def _devices() -> tuple[str, str]:
    devices = jax.local_devices()
    advice = ""
    if jax.default_backend() == "cpu" and Path("/dev/nvidiactl").exists():
        advice = "there is an NVIDIA driver: pip install 'jax[cuda13]', and no JAX_PLATFORMS=cpu"
    return f"{len(devices)} × {devices[0].device_kind}", advice


def _cores() -> tuple[str, str]:
    threads = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))
    launch = read_launch(os.environ)
    ranks = launch.local_size or 1
    advice = ""
    if launch.launcher == "Hydra" and ranks > 1 and (cores := cores_for(ranks)):
        advice = f"mpiexec -bind-to hwthread:{cores} gives each rank its own, and a faster step"
    return str(threads), advice


def _launched() -> tuple[str, str]:
    launch = read_launch(os.environ)
    place = f"rank {launch.rank} of {launch.size}, by {launch.launcher}"
    return place, hint(launch, os.environ)


def _meeting() -> tuple[str, str]:
    launch = read_launch(os.environ)
    if launch.coordinator or launch.size == 1:
        return launch.coordinator or "nowhere: there is one process", ""
    if launch.by_mpi:
        return "an address that is exchanged over MPI", ""
    return "nowhere", "set FDDP_COORDINATOR=host:port of rank 0, equal on all ranks"


def _nccl() -> tuple[str, str]:
    if jax.default_backend() in ("cpu", "tpu"):
        return "no GPU here", ""
    return "ready", ""


def _mpi() -> tuple[str, str, str | None]:
    """Returns the status of MPI, advice, and the vendor of mpi4py's MPI."""
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    if missing:
        command = " ".join([*mpi_vendors.without_cuda(), "pip install"])
        advice = (
            f"pip install mpich where there is no system MPI, then {command} {' '.join(missing)}"
        )
        return f"{' and '.join(missing)} missing", advice, None
    # Installed packages do not load if they were built against an absent MPI.
    vendor, problem = mpi_vendors.loaded()
    if vendor is None:
        problem += "; mpi4py finds no MPI: pip install mpich, or install a system MPI"
        return "does not load", problem, None
    if problem:
        return "does not load", f"{problem}: {mpi_vendors.rebuild(vendor)}", vendor
    advice = mpi_vendors.small_memory(2) if vendor == "MPICH" else ""
    return f"ready: {vendor}", advice, vendor


def _launcher(vendor: str | None) -> tuple[str, str]:
    """Returns the launcher to use, and advice if the first on the PATH is of another MPI."""
    srun = shutil.which("srun")
    if srun and "SLURM_JOB_ID" in os.environ:
        return srun, ""
    launchers = list(mpi_vendors.launchers(vendor))
    if srun and not launchers:
        return srun, ""
    if not launchers:
        return (
            "none found",
            "python -m fddp run starts ranks without it; pip install mpich brings mpiexec",
        )
    launcher, launcher_vendor = launchers[0]
    mpiexec = shutil.which("mpiexec")
    vendors = dict(launchers)
    if vendor and launcher_vendor != vendor:
        advice = f"mpi4py has {vendor}, whose mpiexec is not installed: install it"
        return f"{launcher} ({launcher_vendor or 'whose?'})", advice
    if vendor and mpiexec and vendors.get(mpiexec) != vendor:
        other_vendor = vendors.get(mpiexec) or "another MPI"
        return launcher, f"mpi4py has {vendor}; plain mpiexec is {mpiexec}, of {other_vendor}"
    return launcher, ""
