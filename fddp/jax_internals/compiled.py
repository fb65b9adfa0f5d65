"""Compiled programs that another process of this host runs."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable


def packed(f: Callable[..., Any], *forms: Any) -> bytes:
    """Compiles a function for this host's CPU, for another process to run. Relies on `jax.experimental`.

    Args:
      f: the function.
      *forms: its arguments' forms.

    Returns:
      The program, to be read on this host by the same version of JAX.
    """
    with jax.default_device(host_cpu()):
        return pickle.dumps(serialize_executable.serialize(jax.jit(f).lower(*forms).compile()))


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
