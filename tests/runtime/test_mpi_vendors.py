"""The vendor of an MPI, read from the output of real programs; and the command that installs
one."""

import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import jax
import pytest

from fddp.runtime import mpi_vendors

# The first lines of `--version`, or of mpicc's `-v` and `--showme:version`.
SAY = {
    "mpiexec.openmpi": "mpiexec.openmpi (OpenRTE) 4.1.4",
    "mpiexec.hydra": "HYDRA build details:",
    "mpicc.openmpi": "mpicc.openmpi: Open MPI 4.1.4 (Language: C)",
    "mpicc.mpich": "mpicc for MPICH version 4.0.2",
}
MISMATCH = """MPI ABI incompatibility detected!
  - MPI library mismatch: mpi4jax was built with 'MPICH Version:' but runtime uses 'Open MPI'.

This can cause silent data corruption or crashes."""
# As much of JAX as is looked at.
JAX = """
class config:
    update = staticmethod(lambda name, value: None)

local_devices = list
"""
# mpi4jax registers what JAX refuses when it starts.
NEWER = """
def refuse():
    raise RuntimeError(
        "Unable to initialize backend 'cpu': INVALID_ARGUMENT: XLA FFI handler registration for "
        "mpi_scan_ffi on platform Host failed because the handler's API version (0.5) is "
        "incompatible with the framework's API version (0.4). Minimum supported API version is "
        "(0.1)."
    )

import jax
jax.local_devices = refuse
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without MPI, and nothing else on the PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, output: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return str(path)


def test_launchers_of_a_vendor_come_first(folder):
    plain = program(folder, "mpiexec", SAY["mpiexec.openmpi"])
    hydra = program(folder, "mpiexec.hydra", SAY["mpiexec.hydra"])
    assert list(mpi_vendors.launchers("MPICH")) == [(hydra, "MPICH"), (plain, "Open MPI")]
    assert list(mpi_vendors.launchers("Open MPI")) == [(plain, "Open MPI"), (hydra, "MPICH")]


def test_a_program_that_says_nothing_known_is_nobodys(folder):
    assert mpi_vendors.vendor_of(program(folder, "mpiexec", "1.0"), "--version") is None


def test_mpi4jax_is_built_anew_with_the_compiler_of_mpi4pys_mpi(folder):
    program(folder, "mpicc", SAY["mpicc.openmpi"])
    compiler = program(folder, "mpicc.mpich", SAY["mpicc.mpich"])
    first, command = mpi_vendors.rebuild("MPICH").split("; ")
    assert first == f"echo jaxlib=={version('jaxlib')} >jaxlib.txt"
    assert "_CONSTRAINT=jaxlib.txt" in command and f" MPI4JAX_BUILD_MPICC={compiler} " in command
    assert "mpi4jax must be built with Intel MPI's mpicc, which is not here" in mpi_vendors.rebuild(
        "Intel MPI"
    )


def test_an_nvcc_without_headers_needs_a_cuda_path(folder):
    assert mpi_vendors.without_cuda() == []
    (folder / "bin").mkdir()
    program(folder / "bin", "nvcc", "nvcc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"))
        assert mpi_vendors.without_cuda() == ["CUDA_PATH=/usr/local/cuda"]
        (folder / "include").mkdir()
        (folder / "include" / "cuda_runtime.h").touch()
        assert mpi_vendors.without_cuda() == []


@pytest.mark.steps
@pytest.mark.parametrize(
    ("mpi4jax", "problem"),
    [
        ("", ""),
        (f"raise RuntimeError({MISMATCH!r})", "mpi4jax was built with MPICH, mpi4py has Open MPI"),
        (NEWER, f"mpi4jax was built with a newer jaxlib than {version('jaxlib')}"),
        (
            "raise ImportError('libmpi.so.12: cannot open')",
            "ImportError: libmpi.so.12: cannot open",
        ),
    ],
)
def test_mpi4jax_is_loaded_beside_mpi4py_to_see_whether_they_belong_together(
    tmp_path, monkeypatch, mpi4jax, problem
):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: initialize = True\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("get_vendor = lambda: ('Open MPI', (4, 1, 4))\n")
    (tmp_path / "mpi4jax.py").write_text(mpi4jax)
    if mpi4jax:  # a process that loads JAX takes seconds, and a single one is enough
        (tmp_path / "jax.py").write_text(JAX)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert mpi_vendors.loaded() == ("Open MPI", problem)


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        (RuntimeError(MISMATCH), "MPI ABI incompatibility detected!"),
        (ImportError("libmpi.so.12: cannot open"), "libmpi.so.12: cannot open"),
        (None, "the handler's API version (0.5)"),  # JAX refuses it when it starts
    ],
    ids=["MPI", "library", "jaxlib"],
)
def test_an_mpi4jax_that_does_not_fit_is_an_error_that_names_the_doctor(
    monkeypatch, refuses, reason
):
    def find(name: str) -> ModuleType:
        if refuses:
            raise refuses
        return ModuleType(name)

    def start() -> None:
        raise RuntimeError("the handler's API version (0.5)\nand more")

    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(jax, "local_devices", start)
    with pytest.raises(RuntimeError) as error:
        mpi_vendors.import_mpi4jax()
    assert str(error.value) == (
        f"backend 'mpi': mpi4jax does not work with mpi4py's MPI and this jaxlib ({reason}); "
        "`python -m fddp doctor` prints the command that repairs it, or use backend 'gloo'."
    )


def test_a_jax_that_does_not_start_is_not_blamed_on_mpi4jax(monkeypatch):
    def start() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(importlib, "import_module", ModuleType)
    monkeypatch.setattr(jax, "local_devices", start)
    with pytest.raises(RuntimeError, match=r"^no device$"):
        mpi_vendors.import_mpi4jax()
