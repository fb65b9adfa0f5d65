"""Programs that this process compiles and does not run: another process does, or they are only read."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
from jax import export
from jax._src import config


def compile_to_read(lowered: Any, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program whose text or memory is read, such as one for GPUs that are not here.

    JAX would write it into its compilation cache and warn at each later run that it cannot be loaded.
    """
    with config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile(compiler_options=options)


def packed(f: Callable[..., Any], *forms: Any) -> bytes:
    """Exports a function of lists of arrays, for another process to compile for its CPU.

    A compiled program would not do: XLA:CPU packs no code of a program that it has read from JAX's compilation cache.
    """
    return bytes(export.export(jax.jit(f), platforms=["cpu"])(*forms).serialize())


def unpacked(program: bytes) -> Callable[..., Any]:
    """Compiles an exported function for the CPU."""
    exported = export.deserialize(bytearray(program))
    args, kwargs = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    with jax.default_device(host_cpu()):
        return jax.jit(exported.call).lower(*args, **kwargs).compile()


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
