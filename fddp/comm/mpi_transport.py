"""Messages of a lane over MPI, which free the core while they wait."""

import time
from collections.abc import Sequence
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
            requests = [comm.Iallreduce(MPI.IN_PLACE, part, op=MPI.SUM) for part in parts]
        elif kind == "gather":
            requests = [comm.Iallgather(array[0].copy(), array)]
        else:
            requests = [comm.Ialltoall(array.copy(), array)]
        poll_until_done(requests)

    return send


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
