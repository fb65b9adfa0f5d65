"""Runs JAX's coordination service in a process next to rank 0, which it outlives.

JAX runs the service inside rank 0. When rank 0 dies, JAX ends all other processes with its own
stack traces, before fddp can report which rank died where.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import jax

import fddp.jax_internals
from fddp.jax_internals import HEARTBEAT_S, coordination_client, secured

LOOSE = "127.0.0.1:0"  # the address of JAX's own service, which no rank uses
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import service
getattr(service, sys.argv[2])(sys.argv[3], int(sys.argv[4]))
"""


def start_coordinator(bind: str, rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    """Starts the service next to rank 0; every rank calls this.

    The service listens at `bind`, host:port. JAX's variable replaces any address but loopback. With
    certificates (`secured`) JAX's own service listens there.

    Returns the address for JAX's own service to listen at, and the files that rank 0 and its
    watcher hold open: the separate service ends when they close.
    """
    if not bind.startswith("127.0.0.1:"):
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind)
    if secured():
        return bind, ()
    if rank:
        return LOOSE, ()
    return LOOSE, (_serve(bind, size),)


def wait_for_all() -> None:
    # JAX would wait five minutes, and a rank may evaluate for longer.
    client = coordination_client()
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.wait_at_barrier("fddp/end", 1000 * HEARTBEAT_S)


def start_service(how: str, address: str, size: int, stdin: int) -> None:
    """Starts a function of `jax_internals/service.py` in a process that outlives this one."""
    folder = Path(fddp.jax_internals.__file__).parent
    # A new session: a signal to rank 0's process group must not end the service. Its log is
    # dropped: the ranks report the same in our words.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, str(folder), how, address, str(size)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    answers: IO[bytes] | Any = process.stdout
    with answers:
        answer = answers.readline().decode().strip()
    process.returncode = 0  # never waited for: it outlives this process
    if answer != "listens":
        raise RuntimeError(
            f"JAX's coordination service did not start at {address}: "
            f"{answer or 'it ended at once'}."
        )


def _serve(address: str, size: int) -> int:
    read_end, write_end = os.pipe()
    try:
        start_service("serve", address, size, read_end)
    except RuntimeError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end
