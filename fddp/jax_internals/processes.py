"""The connections between JAX's processes."""

import socket
from functools import partial
from typing import Any

from jax._src import config, distributed, xla_bridge
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from fddp.jax_internals.service import HEARTBEAT_S


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


def connect_to_service(address: str, rank: int, size: int, timeout_s: int) -> None:
    """Connects this process to a coordination service, in place of an earlier one.

    Relies on `jaxlib._jax.get_distributed_runtime_client` and `jax._src.distributed`.
    """
    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=timeout_s,
        heartbeat_timeout=HEARTBEAT_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client, state.process_id, state.num_processes = client, rank, size
    state.coordinator_address = address


def bind_gloo(address: str) -> None:
    """Makes Gloo listen at an address of this host, not at the one that the host's name has.

    Relies on JAX's call of `jaxlib._jax.make_gloo_tcp_collectives`, when its devices start.
    """
    _jax.make_gloo_tcp_collectives = partial(_make_gloo, hostname=address)


_make_gloo = _jax.make_gloo_tcp_collectives


def gloo_host() -> str:
    """The address of this host, or the name, at which Gloo listens."""
    bound = _jax.make_gloo_tcp_collectives
    return bound.keywords["hostname"] if isinstance(bound, partial) else socket.gethostname()


def leave_service() -> None:
    """Disconnects from the coordination service, whose end then no longer ends this process.

    JAX's devices remain, and so do connections that Gloo has opened. It opens no further ones.
    """
    coordination_client().shutdown()
