"""Runs JAX's coordination service in a process beside rank 0; it outlives rank 0 until the others have said why.

JAX runs it inside rank 0. When that dies, JAX ends all other processes with stack traces of its own, before fddp can
say which rank died where.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

import fddp.jax_internals
from fddp.jax_internals import HEARTBEAT_S, coordination_client, secured

LOOSE = "127.0.0.1:0"  # where JAX's own service listens, which no rank uses
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from service import serve
serve(sys.argv[2], int(sys.argv[3]))
"""


class Coordinator(NamedTuple):
    """The service, started."""

    bind: str
    """The address at which JAX's own service is to listen."""
    kept: tuple[int, ...]
    """Files for rank 0 and its watcher to hold: without them the service beside rank 0 ends."""


def start_coordinator(bind: str, rank: int, size: int) -> Coordinator:
    """Starts the service beside rank 0; every rank calls this.

    Args:
      bind: host:port at which it is to listen, unless JAX's variable names another.
      rank: of this process.
      size: the number of processes.

    Returns:
      The address for JAX's own service, and the files to be held.

    Raises:
      RuntimeError: it does not start; says why.
    """
    if not bind.startswith("127.0.0.1:"):
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind)
    if secured():
        return Coordinator(bind, ())
    return Coordinator(LOOSE, (_serve(bind, size),) if rank == 0 else ())


def wait_for_all() -> None:
    """Waits until every rank has come to the end. JAX would wait five minutes, and a rank may evaluate for longer."""
    client = coordination_client()
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.wait_at_barrier("fddp/end", 1000 * HEARTBEAT_S)


def _serve(address: str, size: int) -> int:
    held, kept = os.pipe()
    folder = Path(fddp.jax_internals.__file__).parent
    # A session of its own: whatever ends rank 0's group of processes must leave it. Its log is dropped: the ranks say
    # the same in our words.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, str(folder), address, str(size)],
        stdin=held,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(held)
    answers: IO[bytes] | Any = process.stdout
    with answers:
        answer = answers.readline().decode().strip()
    process.returncode = 0  # nobody waits for it: it outlives this process
    if answer != "listens":
        os.close(kept)
        raise RuntimeError(f"JAX's coordination service did not start at {address}: {answer or 'it ended at once'}.")
    return kept
