"""Messages of a lane over MPI, which free the core while they wait."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fddp.comm.lane_thread import Send
from fddp.program import Kind

MESSAGES = 4
ASKS = 16
FIRST_WAIT_S = 2e-5
LONGEST_WAIT_S = 1e-3


def mpi_send(comm: Any) -> Send:
    """Makes the exchange of a lane's messages, on an mpi4py communicator without other users."""
    from mpi4py import MPI

    def send(kind: Kind, array: np.ndarray) -> None:
        if kind == "sum":
            parts = np.array_split(array, MESSAGES)
            poll_until_done([comm.Iallreduce(MPI.IN_PLACE, part, op=MPI.SUM) for part in parts])
        else:
            begin = {"gather": comm.Iallgather, "exchange": comm.Ialltoall}[kind]
            summand = array[0] if kind == "gather" else array
            poll_until_done([_bytes_of(begin)(summand.copy(), array)])

    return send


def _bytes_of(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a collective without arithmetic move bytes: MPI lacks some dtypes."""
    return lambda message, received: begin(message.view(np.uint8), received.view(np.uint8))


def poll_until_done(requests: Sequence[Any]) -> None:
    """Polls messages until all are done, in bursts at growing intervals.

    MPI progresses one step per poll, and a message takes many steps. A single poll would leave
    arrived data unread, and the link idle, until the next poll.
    """
    from mpi4py import MPI

    wait = FIRST_WAIT_S
    while not any(MPI.Request.Testall(requests) for _ in range(ASKS)):
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)
