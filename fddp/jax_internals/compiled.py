"""Programs that this process compiles and does not run: another process does, or they are only read."""

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
    """Compiles a program whose text or memory is read, such as one for GPUs that are not here.

    JAX would write that one into its compilation cache and warn at each later run that it cannot be
    loaded. Relies on the backend that a lowered program names.
    """
    elsewhere = lowered._lowering.compile_args["backend"].runtime_type == "compile_only_runtime"
    return _compile_unsaved(lowered, options) if elsewhere else lowered.compile(compiler_options=options)


def packed(f: Callable[..., Any], *forms: Any) -> bytes:
    """Compiles a function for this host's CPU, for another process to run. Relies on `jax.experimental`.

    XLA:CPU packs no code of a program that it has read from JAX's compilation cache: the name is new
    each time, so that the cache does not have it.
    """

    def program(*args: Any) -> Any:
        return f(*args)

    program.__name__ = f"packed_{secrets.token_hex(8)}"
    with jax.default_device(host_cpu()):
        compiled = _compile_unsaved(jax.jit(program).lower(*forms))
    return pickle.dumps(serialize_executable.serialize(compiled))


def _compile_unsaved(lowered: Any, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program that JAX does not write into its compilation cache."""
    with config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile(compiler_options=options)


def unpacked(program: bytes) -> Callable[..., Any]:
    """Loads what `packed` made, in whatever process of the same host."""
    return serialize_executable.deserialize_and_load(
        *pickle.loads(program), backend="cpu", execution_devices=[host_cpu()]
    )


def host_cpu() -> Any:
    """Finds the device that is this host's CPU, whatever devices replicas have.

    Raises:
      RuntimeError: JAX was told to leave CPUs out.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"islands are merged on the CPU, which JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')} leaves out: put cpu "
            "behind it, JAX_PLATFORMS=cuda,cpu."
        ) from error
