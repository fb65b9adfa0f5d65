"""JAX's coordination service, by itself: a script that loads jaxlib alone."""

import os
import sys

# Seconds without a sign of life after which JAX ends all processes in its own words: the watchers do so sooner, or know
# better. And those that it waits for all at the end, its default.
HEARTBEAT_S = 7 * 86_400
SHUTDOWN_S = 300


def serve(address: str, size: int) -> None:
    """Serves until nobody holds the other end of stdin. Relies on `jaxlib._jax.get_distributed_runtime_service`.

    Args:
      address: host:port at which to listen.
      size: the number of processes.
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
    os._exit(0)  # at its end the service would wait for processes that are gone, or behind a wire that is cut
