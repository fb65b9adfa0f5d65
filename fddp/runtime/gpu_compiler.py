"""XLA's compiler for NVIDIA's GPUs, which the extra `audit` brings without the rest of CUDA.

JAX takes the package `jax-cuda13-pjrt` for a GPU installation, and where the rest is missing it calls that a fault,
with a traceback at the start of every program. It is none: the compiler needs no GPU.
"""

import importlib.util
import logging
import os
from importlib.metadata import version

import jax

VERSIONS = (13, 12)


def missing_compiler() -> str | None:
    """Says what keeps this installation from compiling for GPUs, and what to do.

    Returns:
      A sentence, or None: nothing does.
    """
    found = [number for number in VERSIONS if _installed(f"jax_plugins.xla_cuda{number}")]
    package = f"jax-cuda{found[0] if found else VERSIONS[0]}-pjrt"
    install = f"pip install '{package}=={jax.__version__}'"
    if not found:
        return f"compiling for GPUs needs the package {package}, not installed here: {install}."
    if version(package) != jax.__version__:
        return f"{package} {version(package)} does not belong to jax {jax.__version__}: {install}."
    return None


def expect_no_gpu() -> None:
    """Tells JAX, before it starts, that the compiler is meant to be there without the rest of CUDA, where it is so.

    Looks for packages and starts nothing: `import fddp` does it.
    """
    alone = not any(_installed(f"jax_cuda{number}_plugin") for number in VERSIONS)
    if alone and any(_installed(f"jax_plugins.xla_cuda{number}") for number in VERSIONS):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        for number in VERSIONS:
            logging.getLogger(f"jax_plugins.xla_cuda{number}").setLevel(logging.ERROR)


def _installed(name: str) -> bool:
    package = name.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None
