"""Runs JAX's coordination service without JAX: a script that loads only jaxlib."""

import os
import sys
import time
from typing import Any

# Seconds without a heartbeat until JAX ends all processes: a week, as the watchers act earlier and
# know more. `SHUTDOWN_S` is JAX's default wait for all processes at the end.
HEARTBEAT_S = 7 * 86_400
SHUTDOWN_S = 300
MEETING_S = 60


def serve(address: str, size: int) -> None:
    """Serves `size` processes at `address` (host:port) until stdin is closed.

    Relies on `jaxlib._jax.get_distributed_runtime_service`.
    """
    service = _started(address, size, recoverable=False)
    if service:
        sys.stdin.read()
        # A regular exit would wait for processes that have ended or lost their connection.
        os._exit(0)


def serve_briefly(address: str, size: int) -> None:
    """Serves `size` processes for a minute; each may leave at any time."""
    service = _started(address, size, recoverable=True)
    if service:
        time.sleep(MEETING_S)
        os._exit(0)


def _started(address: str, size: int, *, recoverable: bool) -> Any:
    """Starts the service, and reports on stdout; None if it cannot start."""
    times = {"heartbeat_timeout": HEARTBEAT_S, "shutdown_timeout": SHUTDOWN_S}
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        service = _jax.get_distributed_runtime_service(
            address, size, recoverable=recoverable, **times
        )
    except Exception as error:
        print(str(error).splitlines()[0], flush=True)
        return None
    print("listens", flush=True)
    return service


if __name__ == "__main__":
    how, address, size = sys.argv[1:]
    {"serve": serve, "serve_briefly": serve_briefly}[how](address, int(size))
