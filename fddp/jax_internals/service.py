"""Runs JAX's coordination service without JAX: a script that loads only jaxlib."""

import os
import sys

# Seconds without a heartbeat until JAX ends all processes: a week, as the watchers act earlier and
# know more. `SHUTDOWN_S` is JAX's default wait for all processes at the end.
HEARTBEAT_S = 7 * 86_400
SHUTDOWN_S = 300


def serve(address: str, size: int) -> None:
    """Serves `size` processes at `address` (host:port) until stdin is closed.

    Relies on `jaxlib._jax.get_distributed_runtime_service`.
    """
    times = {"heartbeat_timeout": HEARTBEAT_S, "shutdown_timeout": SHUTDOWN_S}
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        _service = _jax.get_distributed_runtime_service(address, size, recoverable=False, **times)
    except Exception as error:
        print(str(error).splitlines()[0], flush=True)
        return
    print("listens", flush=True)
    sys.stdin.read()
    # A regular exit would wait for processes that have ended or lost their connection.
    os._exit(0)
