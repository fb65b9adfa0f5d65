"""Collectives of MPI that free the core while they wait, between programs or inside a program."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Shaped

from fddp.comm.communicator import Communicator, mpi_word, rank_communicator
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
    """Makes the collectives between programs on an mpi4py communicator without other users.

    mpi4jax's call spins on a core that the backward pass needs. MPI's nonblocking call, polled less
    and less often, leaves it free. An array is sent in several messages: one is on the wire while
    MPI adds up another.
    """
    from mpi4py import MPI

    device = jax.local_devices()[0]
    like = receive_buffers()

    def all_reduce(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        summand = jax.device_get(mpi_word(x))
        received = like(summand)
        messages = zip(np.array_split(summand, MESSAGES), np.array_split(received, MESSAGES))
        poll_until_done(
            [comm.Iallreduce(message, total, op=MPI.SUM) for message, total in messages]
        )
        return jax.device_put(received, device).astype(x.dtype)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        summand = jax.device_get(mpi_word(x))
        received = like(summand[: summand.size // comm.size])
        poll_until_done([comm.Ireduce_scatter_block(summand, received, op=MPI.SUM)])
        return jax.device_put(received, device).astype(x.dtype)

    def all_gather(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
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
    return Transport(
        all_reduce, reduce_scatter, all_gather, tree_reduce, waiting_communicator(comm)
    )


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


def waiting_communicator(comm: Any) -> Communicator:
    """Makes collectives inside a program that free the core while they wait, as in `mpi_transport`.

    One thread at a time may use the mpi4py communicator.
    """
    from mpi4py import MPI

    like = receive_buffers()

    def collective(
        begin: Callable[[np.ndarray, np.ndarray], Any], rows: int = 1
    ) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> np.ndarray:
            message = np.ascontiguousarray(x).reshape(-1)
            received = like(message, rows)
            poll_until_done([begin(message, received)])
            return received.reshape(rows, *x.shape)

        def call(x: jax.Array) -> jax.Array:
            form = jax.ShapeDtypeStruct((rows, *x.shape), x.dtype)
            return io_callback(run, form, x, ordered=True)

        return call

    added = collective(partial(comm.Iallreduce, op=MPI.SUM))
    exchanged = collective(_bytes_of(comm.Ialltoall))
    gathered = collective(_bytes_of(comm.Iallgather), comm.size)
    return rank_communicator(
        comm.size,
        lambda: jnp.int32(comm.rank),
        lambda x: added(x)[0],
        lambda rows: exchanged(rows)[0],
        gathered,
    )


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
