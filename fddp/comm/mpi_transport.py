"""Collectives of MPI that free the core while they wait, between programs or inside a program."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from fddp.comm.program_lane import Send
from fddp.comm.summation_tree import parts_for_each, sum_of_parts
from fddp.comm.transport import Transport
from fddp.program import Kind

MESSAGES = 4
ASKS = 16
FIRST_WAIT_S = 2e-5
LONGEST_WAIT_S = 1e-3
ALIGNMENT = 64


def mpi_transport(comm: Any) -> Transport:
    """Makes the sums between programs on an mpi4py communicator without other users."""
    device = jax.local_devices()[0]
    like = receive_buffers()

    def all_gather(x: jax.Array) -> jax.Array:
        shard = jax.device_get(x)
        received = like(shard, comm.size)
        poll_until_done([_bytes_of(comm.Iallgather)(shard, received)])
        return jax.device_put(received, device)

    def tree_reduce(x: jax.Array, blocks: int) -> jax.Array:
        if comm.size == 1:
            return x
        rows = jax.device_get(for_each(x, blocks))
        received = like(rows.reshape(-1)).reshape(rows.shape)
        poll_until_done([_bytes_of(comm.Ialltoall)(rows, received)])
        return all_gather(added(jax.device_put(received, device), blocks))[: x.size // blocks]

    for_each = jax.jit(partial(parts_for_each, comm.size), static_argnums=1)
    added = jax.jit(sum_of_parts, static_argnums=1)
    return Transport(tree_reduce)


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


def receive_buffers() -> Callable[..., Shaped[np.ndarray, " n"]]:
    """Makes an allocator of receive buffers that reuses memory, for one thread at a time.

    The first write to each page of fresh memory is slow. `like(x, times=1)` returns an
    uninitialized array of `times` the size of `x` and of its dtype, aligned so that XLA takes it
    over without a copy. Its memory is reused when the array and its readers (views, JAX arrays) are
    deleted.

    >>> import numpy as np
    >>> like = receive_buffers()
    >>> first = like(np.zeros(3))
    >>> address = first.ctypes.data
    >>> del first
    >>> like(np.ones(3)).ctypes.data == address
    True
    """
    idle: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def like(x: Shaped[np.ndarray, " n"], times: int = 1) -> Shaped[np.ndarray, " m"]:
        spare = idle[times * x.nbytes]
        room = spare.pop() if spare else _aligned(times * x.nbytes)
        # Made from a memoryview (`.data`): views then keep this array alive, not only its memory.
        view = np.frombuffer(room.data, x.dtype)
        weakref.finalize(view, spare.append, room)
        return view

    return like


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + nbytes]
