"""The connections between JAX's processes."""

from typing import Any

from jax._src import config, distributed, xla_bridge


def coordination_client() -> Any:
    """Returns this process's client of the coordination service of `jax.distributed`.

    Relies on `jax._src.distributed`.
    """
    return distributed.global_state.client


def secured() -> bool:
    """True if JAX's processes authenticate by certificates. Relies on `mtls_cert_file`."""
    setting = getattr(config, "mtls_cert_file", None)  # since 0.11
    return setting is not None and bool(setting.value)


def backends_started() -> bool:
    """True if JAX has started its devices; it then cannot join processes any more.

    Relies on `jax._src.xla_bridge`.
    """
    return xla_bridge.backends_are_initialized()
