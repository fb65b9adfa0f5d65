"""Compiles programs for other processes, or for reading only."""

import math
import os
import pickle
import secrets
from collections.abc import Callable
from typing import Any

import jax
from jax._src import config
from jax.experimental import serialize_executable


def compile_to_read(lowered: Any, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program to read its text or memory, such as a program for absent GPUs.

    JAX would write a program for absent devices into its compilation cache, and warn at each later
    run that it cannot be loaded. Relies on the backend that a lowered program names.
    """
    if lowered._lowering.compile_args["backend"].runtime_type == "compile_only_runtime":
        return _compile_unsaved(lowered, options)
    return lowered.compile(compiler_options=options)


def packed(f: Callable[..., Any], *forms: Any) -> bytes:
    """Compiles a function for this host's CPU, and serializes it for another process.

    Relies on `jax.experimental`. XLA:CPU does not serialize the code of a program from JAX's
    compilation cache, so each program has a new name, which the cache does not have.
    """

    def program(*args: Any) -> Any:
        return f(*args)

    program.__name__ = f"packed_{secrets.token_hex(8)}"
    with jax.default_device(host_cpu()):
        compiled = _compile_unsaved(jax.jit(program).lower(*forms))
    return pickle.dumps(serialize_executable.serialize(compiled))


def _compile_unsaved(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a program without writing it into JAX's compilation cache."""
    with config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile(compiler_options=options)


def unpacked(program: bytes) -> Callable[..., Any]:
    """Loads a function from `packed` in any process of the same host."""
    return serialize_executable.deserialize_and_load(
        *pickle.loads(program), backend="cpu", execution_devices=[host_cpu()]
    )


def host_cpu() -> Any:
    """Returns the CPU device of this host; a RuntimeError if JAX_PLATFORMS excludes CPUs."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "islands are merged on the CPU, which "
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')} excludes: append cpu, "
            "JAX_PLATFORMS=cuda,cpu."
        ) from error
