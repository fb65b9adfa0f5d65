"""Talk between JAX's processes."""

from typing import Any

from jax._src import config, distributed, xla_bridge


def coordination_client() -> Any:
    """This process's client of the service that `jax.distributed` started. Relies on `jax._src.distributed`."""
    return distributed.global_state.client


def secured() -> bool:
    """Whether JAX's processes are to know each other by certificates. Relies on the setting `mtls_cert_file`."""
    setting = getattr(config, "mtls_cert_file", None)  # since 0.11
    return setting is not None and bool(setting.value)


def backends_started() -> bool:
    """Whether JAX has started its devices, after which it joins no processes. Relies on `jax._src.xla_bridge`."""
    return xla_bridge.backends_are_initialized()
