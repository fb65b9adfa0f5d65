"""Collectives of MPI that leave the core to others while they wait: between programs, or in one that only sends."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Shaped

from fddp.comm.communicator import Communicator, mpi_word, rank_communicator
from fddp.comm.summation_tree import parts_for_each, sum_of_parts
from fddp.comm.transport import Transport

MESSAGES = 4
ASKS = 16
FIRST_WAIT_S = 2e-5
LONGEST_WAIT_S = 1e-3
ALIGNMENT = 64


def mpi_transport(comm: Any) -> Transport:
    """Makes collectives of mpi4py between programs.

    mpi4jax's own call spins on a core that the backward pass needs. MPI's nonblocking call, asked less and less often,
    leaves it free. An array is sent in several messages: one is on the wire while another is being added up.

    Args:
      comm: an mpi4py communicator that nothing else uses.

    Returns:
      The transport.
    """
    from mpi4py import MPI

    device = jax.local_devices()[0]
    like = receive_buffers()

    def all_reduce(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(mpi_word(x))
        received = like(sent)
        parts = zip(np.array_split(sent, MESSAGES), np.array_split(received, MESSAGES))
        wait_for([comm.Iallreduce(mine, total, op=MPI.SUM) for mine, total in parts])
        return jax.device_put(received, device).astype(x.dtype)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(mpi_word(x))
        received = like(sent[: sent.size // comm.size])
        wait_for([comm.Ireduce_scatter_block(sent, received, op=MPI.SUM)])
        return jax.device_put(received, device).astype(x.dtype)

    def all_gather(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(x)
        received = like(sent, comm.size)
        wait_for([_bytes_of(comm.Iallgather)(sent, received)])
        return jax.device_put(received, device)

    def tree_reduce(x: jax.Array, blocks: int) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(for_each(x, blocks))
        received = like(sent.reshape(-1)).reshape(sent.shape)
        wait_for([_bytes_of(comm.Ialltoall)(sent, received)])
        return all_gather(added(jax.device_put(received, device), blocks))[: x.size // blocks]

    for_each = jax.jit(partial(parts_for_each, comm.size), static_argnums=1)
    added = jax.jit(sum_of_parts, static_argnums=1)
    return Transport(all_reduce, reduce_scatter, all_gather, tree_reduce, waiting_communicator(comm))


def waiting_communicator(comm: Any) -> Communicator:
    """Makes collectives inside of a program that leave the core to others while they wait, as those between programs.

    Args:
      comm: an mpi4py communicator that one thread at a time uses.

    Returns:
      The communicator.
    """
    from mpi4py import MPI

    like = receive_buffers()

    def collective(begin: Callable[[np.ndarray, np.ndarray], Any], rows: int = 1) -> Callable[[jax.Array], jax.Array]:
        def run(x: Any) -> np.ndarray:
            sent = np.ascontiguousarray(x).reshape(-1)
            received = like(sent, rows)
            wait_for([begin(sent, received)])
            return received.reshape(rows, *x.shape)

        def call(x: jax.Array) -> jax.Array:
            back = jax.ShapeDtypeStruct((rows, *x.shape), x.dtype)
            return io_callback(run, back, x, ordered=True)

        return call

    added = collective(partial(comm.Iallreduce, op=MPI.SUM))
    exchanged = collective(_bytes_of(comm.Ialltoall))
    gathered = collective(_bytes_of(comm.Iallgather), comm.size)
    return rank_communicator(comm, lambda x: added(x)[0], lambda rows: exchanged(rows)[0], gathered)


def _bytes_of(begin: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that only moves numbers, as one of bytes: MPI knows not all of them."""
    return lambda sent, received: begin(sent.view(np.uint8), received.view(np.uint8))


def wait_for(requests: Sequence[Any]) -> None:
    """Waits for messages: asks less and less often whether all are done, each time several times in a row.

    MPI works only while it is asked, one step each time, and a message takes many steps. Asked only once, it would
    leave what has arrived unread, and the link idle, until the next time.
    """
    from mpi4py import MPI

    wait = FIRST_WAIT_S
    while not any(MPI.Request.Testall(requests) for _ in range(ASKS)):
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)


def receive_buffers() -> Callable[..., Shaped[np.ndarray, " n"]]:
    """Makes a function that gives arrays to receive into; call it from one thread at a time.

    The first write to each page of fresh memory is slow. So memory is given out again as soon as nobody reads it.

    Returns:
      `like(x, times=1)`: gives an array of `times` the size of `x` and of its dtype, with arbitrary content, aligned so
      that XLA takes it over without a copy. Its memory is given out again when the array and all that look into it
      (views, JAX arrays) are gone.

    Example:
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
        # Made over a memoryview, `.data`: views then keep this very array alive, and not only the memory below it.
        view = np.frombuffer(room.data, x.dtype)
        weakref.finalize(view, spare.append, room)
        return view

    return like


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + nbytes]
