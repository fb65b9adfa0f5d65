"""Identifies the MPI of mpi4py, mpi4jax and mpiexec: all must use the same, and often do not.

mpi4py loads the first MPI library of its search path. mpi4jax uses the MPI of the compiler that
built it. The shell runs the first mpiexec on the PATH.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

# Words in the version texts of each MPI. Open MPI calls its launcher OpenRTE or PRRTE, MPICH Hydra.
VENDORS = {
    "Open MPI": ("Open MPI", "OpenRTE", "PRRTE"),
    "Intel MPI": ("Intel",),
    "MPICH": ("MPICH", "HYDRA"),
}
LAUNCHERS = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
COMPILERS = ("mpicc", "mpicc.openmpi", "mpicc.mpich")
# Words of JAX's error for an mpi4jax built with another jaxlib.
API = "API version"
# Loading starts no MPI. On import mpi4jax compares the MPI that it was built with; JAX compares the
# jaxlib when it starts.
LOAD = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
import jax, mpi4jax
jax.config.update("jax_platforms", "cpu")
jax.local_devices()
"""
SHARED_MIB = 6  # MPICH's memory in /dev/shm for each rank of a host


def small_memory(ranks: int) -> str:
    """Describes a /dev/shm in which MPICH may crash with this many ranks; empty if it is enough."""
    memory = Path("/dev/shm")
    size_mib = shutil.disk_usage(memory).total / 2**20 if memory.is_dir() else math.inf
    if size_mib >= SHARED_MIB * max(4, ranks):  # 16 MiB were too few for one rank
        return ""
    return (
        f"/dev/shm has {size_mib:.3g} MiB, and MPICH may crash with a bus error below "
        f"{SHARED_MIB} MiB for each rank: docker run --shm-size=1g, or backend 'gloo' "
        "(python -m fddp run --by processes)"
    )


def loaded() -> tuple[str | None, str]:
    """Loads mpi4py and mpi4jax in a new process; returns mpi4py's vendor and an error, or ''."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=60
        )
    except subprocess.SubprocessError as error:
        return None, str(error)
    vendor = next(iter(run.stdout.splitlines()), None)
    build_vendor = re.search("mpi4jax was built with '([^']+)'", run.stderr)
    if run.returncode == 0:
        return vendor, ""
    if build_vendor and vendor:
        built_with = _named(build_vendor[1]) or build_vendor[1]
        return vendor, f"mpi4jax was built with {built_with}, mpi4py has {vendor}"
    if API in run.stderr:
        return vendor, f"mpi4jax was built with a newer jaxlib than {version('jaxlib')}"
    return vendor, (run.stderr.strip() or f"it ended with {run.returncode}").splitlines()[-1]


def import_mpi4jax() -> None:
    """Imports mpi4jax and starts JAX. Raises if mpi4jax was built for another MPI or jaxlib."""
    try:
        importlib.import_module("mpi4jax")
    except (ImportError, RuntimeError) as error:
        raise _unfit(error) from None
    try:
        jax.local_devices()  # JAX starts and compares the jaxlib of mpi4jax's build
    except RuntimeError as error:
        if API not in str(error):
            raise  # JAX does not start, for a reason unrelated to mpi4jax
        raise _unfit(error) from None


def launchers(vendor: str | None) -> Iterator[tuple[str, str | None]]:
    """Yields the installed launchers as (path, vendor), launchers of `vendor` first."""
    programs = [(path, vendor_of(path, "--version")) for path in _programs(LAUNCHERS)]
    yield from sorted(programs, key=lambda program: program[1] != vendor)


def rebuild(vendor: str) -> str:
    """The command that builds mpi4jax against mpi4py's MPI."""
    compilers = [
        path for path in _programs(COMPILERS) if vendor_of(path, "-v", "--showme:version") == vendor
    ]
    if not compilers:
        return f"mpi4jax must be built with {vendor}'s mpicc, which is not here: install it"
    # Without a constraint a build takes the newest jaxlib. PIP_BUILD_CONSTRAINT is for pip 25.3 and
    # later.
    constraints = "UV_BUILD_CONSTRAINT=jaxlib.txt"
    pip = f"uv pip install --python {sys.executable}"
    if importlib.util.find_spec("pip"):
        constraints = "PIP_CONSTRAINT=jaxlib.txt PIP_BUILD_CONSTRAINT=jaxlib.txt"
        pip = f"{sys.executable} -m pip install"
    words = [
        f"echo jaxlib=={version('jaxlib')} >jaxlib.txt;",
        constraints,
        f"MPI4JAX_BUILD_MPICC={compilers[0]}",
        *without_cuda(),
        pip,
        "--force-reinstall --no-deps --no-cache-dir",
        f"mpi4jax=={version('mpi4jax')}",
    ]
    return " ".join(words)


def without_cuda() -> list[str]:
    """Variables that stop mpi4jax's build from looking for CUDA headers if nvcc has none."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or (Path(nvcc).parents[1] / "include" / "cuda_runtime.h").exists():
        return []
    return ["CUDA_PATH=/usr/local/cuda"]


def vendor_of(program: str, *questions: str) -> str | None:
    """The vendor in a program's answer to one of these arguments."""
    for question in questions:
        try:
            run = subprocess.run([program, question], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if vendor := _named((run.stdout + run.stderr).partition("\n")[0]):
            return vendor
    return None


def _named(text: str) -> str | None:
    for vendor, words in VENDORS.items():
        if any(word in text for word in words):
            return vendor
    return None


def _programs(names: tuple[str, ...]) -> list[str]:
    """Paths of the programs with these names, next to this Python first, then on the PATH."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    paths = (shutil.which(name, path=folder) for folder in folders for name in names)
    return list(dict.fromkeys(path for path in paths if path))


def _unfit(error: Exception) -> RuntimeError:
    return RuntimeError(
        "backend 'mpi': mpi4jax does not work with mpi4py's MPI and this jaxlib "
        f"({str(error).splitlines()[0]}); "
        "`python -m fddp doctor` prints the command that repairs it, or use backend 'gloo'."
    )
