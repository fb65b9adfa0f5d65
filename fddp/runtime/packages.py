"""Installed packages, and XLA's compiler for NVIDIA GPUs among them.

The extra `audit` installs the compiler without the rest of CUDA. JAX takes the package
`jax-cuda13-pjrt` for a GPU installation. It reports missing parts of CUDA as a fault, with a
traceback at the start of every program. That is no fault: the compiler needs no GPU.
"""

import logging
import os
from importlib.metadata import PackageNotFoundError, version

import jax

VERSIONS = (13, 12)


def missing_compiler() -> str | None:
    """Describes why this installation cannot compile for GPUs, and the remedy; None if it can."""
    versions = [number for number in VERSIONS if installed(f"jax-cuda{number}-pjrt")]
    package = f"jax-cuda{[*versions, *VERSIONS][0]}-pjrt"
    install = f"pip install '{package}=={jax.__version__}'"
    if not versions:
        return f"compiling for GPUs needs the package {package}, not installed here: {install}."
    if version(package) != jax.__version__:
        return f"{package} {version(package)} does not belong to jax {jax.__version__}: {install}."
    return None


def expect_no_gpu() -> None:
    """Silences JAX's check of CUDA, before JAX starts, if only the compiler is installed."""
    without_cuda = not any(installed(f"jax-cuda{number}-plugin") for number in VERSIONS)
    if without_cuda and any(installed(f"jax-cuda{number}-pjrt") for number in VERSIONS):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        for number in VERSIONS:
            logging.getLogger(f"jax_plugins.xla_cuda{number}").setLevel(logging.ERROR)


def installed(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fddp_version() -> str:
    """Returns the version of fddp, or words for a checkout without one."""
    return installed("fddp") or "a checkout, not installed"
