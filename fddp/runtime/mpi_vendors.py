"""Tells MPIs apart: mpi4py, mpi4jax and mpiexec of one installation must have the same one, and often do not.

mpi4py takes the MPI it finds when it is loaded, mpi4jax the one whose compiler was found when it was built, and the
shell whichever mpiexec comes first.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

# Names that programs of each MPI give themselves. Open MPI calls its launcher OpenRTE or PRRTE, MPICH's is Hydra.
VENDORS = {"Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "Intel MPI": ("Intel",), "MPICH": ("MPICH", "HYDRA")}
LAUNCHERS = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
COMPILERS = ("mpicc", "mpicc.openmpi", "mpicc.mpich")
# Words of JAX's error for an mpi4jax that was built with another jaxlib.
API = "API version"
# Loading starts no MPI. mpi4jax itself compares the MPI it was built with, and JAX, where it starts, the jaxlib.
LOAD = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
import jax, mpi4jax
jax.config.update("jax_platforms", "cpu")
jax.local_devices()
"""


def loaded() -> tuple[str | None, str]:
    """Loads mpi4py and mpi4jax, in a process of its own.

    Returns:
      The vendor of mpi4py's MPI, None if it does not load; and what went wrong, '' if nothing did.
    """
    try:
        run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=60)
    except subprocess.SubprocessError as error:
        return None, str(error)
    vendor = next(iter(run.stdout.splitlines()), None)
    built = re.search("mpi4jax was built with '([^']+)'", run.stderr)
    if run.returncode == 0:
        return vendor, ""
    if built and vendor:
        return vendor, f"mpi4jax was built with {_named(built[1]) or built[1]}, mpi4py has {vendor}"
    if API in run.stderr:
        return vendor, f"mpi4jax was built with a newer jaxlib than {version('jaxlib')}"
    return vendor, (run.stderr.strip() or f"it ended with {run.returncode}").splitlines()[-1]


def import_mpi4jax() -> None:
    """Imports mpi4jax, and starts JAX with it.

    Raises:
      RuntimeError: it was built for another MPI than mpi4py's, or with a newer jaxlib.
    """
    try:
        importlib.import_module("mpi4jax")
    except (ImportError, RuntimeError) as error:
        raise _unfit(error) from None
    try:
        jax.local_devices()  # where JAX starts it compares the jaxlib that mpi4jax was built with
    except RuntimeError as error:
        if API not in str(error):
            raise  # JAX does not start, and mpi4jax has no part in it
        raise _unfit(error) from None


def launchers(vendor: str | None) -> Iterator[tuple[str, str | None]]:
    """The launchers here, each with its vendor: those of the given vendor first, then in the order of the search."""
    found = [(path, vendor_of(path, "--version")) for path in _programs(LAUNCHERS)]
    yield from sorted(found, key=lambda program: program[1] != vendor)


def rebuild(vendor: str) -> str:
    """The command that builds mpi4jax against the MPI that mpi4py has."""
    own = [path for path in _programs(COMPILERS) if vendor_of(path, "-v", "--showme:version") == vendor]
    if not own:
        return f"mpi4jax must be built with {vendor}'s mpicc, which is not here: install it"
    # A build by itself takes the newest jaxlib. The second variable is that of pip 25.3 and later.
    its_pip = importlib.util.find_spec("pip")
    held = ["PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"] if its_pip else ["UV_BUILD_CONSTRAINT"]
    words = [*(f"{name}=jaxlib.txt" for name in held), f"MPI4JAX_BUILD_MPICC={own[0]}", *without_cuda()]
    pip = f"{sys.executable} -m pip install" if its_pip else f"uv pip install --python {sys.executable}"
    again = [pip, "--force-reinstall --no-deps --no-cache-dir", f"mpi4jax=={version('mpi4jax')}"]
    return " ".join([f"echo jaxlib=={version('jaxlib')} >jaxlib.txt;", *words, *again])


def without_cuda() -> list[str]:
    """Variables for mpi4jax's build, which would look for CUDA's headers beside an nvcc that has none."""
    nvcc = shutil.which("nvcc")
    prefix = Path(nvcc).parents[1] if nvcc else None
    missing = prefix is not None and not (prefix / "include" / "cuda_runtime.h").exists()
    return ["CUDA_PATH=/usr/local/cuda"] if missing else []


def vendor_of(program: str, *questions: str) -> str | None:
    """The vendor of a program, by its answer to one of these arguments."""
    for question in questions:
        try:
            run = subprocess.run([program, question], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if vendor := _named((run.stdout + run.stderr).partition("\n")[0]):
            return vendor
    return None


def _named(said: str) -> str | None:
    return next((vendor for vendor, words in VENDORS.items() if any(word in said for word in words)), None)


def _programs(names: tuple[str, ...]) -> list[str]:
    """Paths of the programs of these names: an environment's lie beside its Python, on the PATH or not."""
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    found = (shutil.which(name, path=place) for place in places for name in names)
    return list(dict.fromkeys(path for path in found if path))


def _unfit(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"backend 'mpi': mpi4jax does not go with mpi4py's MPI and this jaxlib ({str(error).splitlines()[0]}); "
        "`python -m fddp doctor` names the command that mends it, or use backend 'gloo'."
    )
