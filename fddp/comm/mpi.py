"""Groups of replicas that are ranks of an MPI communicator, one device each, over mpi4jax and mpi4py."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Shaped, UInt8

from fddp.comm.by_level import ByLevel
from fddp.comm.communicator import Communicator, mpi_communicator, mpi_word, rank_communicator
from fddp.comm.group import Group
from fddp.comm.levels import Levels, Nodes, in_two_levels, same_places
from fddp.comm.mpi_programs import mpi_placement
from fddp.comm.recovery import Recovery, mpi_meet
from fddp.comm.summation_tree import parts_for_each, sum_of_parts
from fddp.comm.transport import Bytes, Hosts, Transport

MESSAGES = 4
ASKS = 16
FIRST_WAIT_S = 2e-5
LONGEST_WAIT_S = 1e-3
ALIGNMENT = 64


def mpi_group(comm: Any) -> Group:
    """Makes a group of the ranks of an mpi4py communicator, one device each.

    Args:
      comm: the communicator; it is cloned.

    Returns:
      The group.

    Raises:
      RuntimeError: this process has several devices.
    """
    if jax.local_device_count() > 1:
        raise RuntimeError(
            f"backend 'mpi' drives one device a process, and this one has {jax.local_device_count()}: start one "
            "process per device, or use backend 'gloo'."
        )

    from mpi4py import MPI

    # Messages inside programs (mpi4jax), of a loss, between programs, of the hosts, after an error, and the user's own
    # must never meet: each kind has a communicator of its own.
    transport = mpi_transport(comm.Clone())
    communicator = mpi_communicator(comm.Clone())
    hosts = mpi_hosts(comm.Clone())
    whole = MPI.COMM_WORLD.Get_group()
    ranks = comm.Get_group()
    return Group(
        rank=comm.rank,
        processes=comm.size,
        size=comm.size,
        backend="mpi",
        global_ranks=tuple(MPI.Group.Translate_ranks(ranks, None, whole)),
        placement=mpi_placement(comm.Clone()),
        communicator=communicator,
        transport=transport,
        hosts=hosts,
        recovery=Recovery(mpi_meet(comm.Clone())),
        make_subgroup=lambda ranks: mpi_group(comm.Create_group(comm.Get_group().Incl(list(ranks)))),
        clone=lambda count: (transport, *(mpi_transport(comm.Clone()) for _ in range(count - 1))),
        levels=mpi_levels(comm, communicator, hosts),
    )


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
        _wait_for([comm.Iallreduce(mine, total, op=MPI.SUM) for mine, total in parts])
        return jax.device_put(received, device).astype(x.dtype)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(mpi_word(x))
        received = like(sent[: sent.size // comm.size])
        _wait_for([comm.Ireduce_scatter_block(sent, received, op=MPI.SUM)])
        return jax.device_put(received, device).astype(x.dtype)

    def all_gather(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(x)
        received = like(sent, comm.size)
        _wait_for([comm.Iallgather(sent.view(np.uint8), received.view(np.uint8))])
        return jax.device_put(received, device)

    def tree_reduce(x: jax.Array, blocks: int) -> jax.Array:
        if comm.size == 1:
            return x
        sent = jax.device_get(for_each(x, blocks))
        received = like(sent.reshape(-1)).reshape(sent.shape)
        _wait_for([comm.Ialltoall(sent.view(np.uint8), received.view(np.uint8))])
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
            _wait_for([begin(sent, received)])
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


def mpi_levels(comm: Any, communicator: Communicator, hosts: Hosts) -> Levels:
    """Makes the levels of MPI's ranks, which sum over nodes first.

    Args:
      comm: mpi4py communicator of the ranks.
      communicator: their collectives inside a program.
      hosts: their collectives between hosts.

    Returns:
      The levels.
    """
    from mpi4py import MPI

    def find() -> list[int]:
        shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = np.array([shared.bcast(comm.rank)])
        shared.Free()
        return hosts.all_gather(first.view(np.uint8)).view(first.dtype).ravel().tolist()

    def make(
        nodes: Nodes, neighbours: Nodes | None = None
    ) -> tuple[Communicator, Callable[[int], tuple[Transport, ...]]]:
        def split() -> list[Any]:
            several = (among for among in (nodes, same_places(nodes), neighbours) if among)
            mine = [
                (k, some.index(comm.rank)) for among in several for k, some in enumerate(among) if comm.rank in some
            ]
            return [comm.Split(number, place) for number, place in mine]

        def carrier() -> Transport:
            several = split()
            node, network = several[:2]
            whole = mpi_transport(comm.Clone())._replace(all_reduce=_two_level_sum(node, network))
            return _with_levels(whole, *map(mpi_transport, several))

        transport = carrier()
        both = in_two_levels(communicator, *map(mpi_communicator, split()))
        return both, lambda count: (transport, *(carrier() for _ in range(count - 1)))

    return Levels(find, make)


def _with_levels(
    whole: Transport, node: Transport, network: Transport, neighbours: Transport | None = None
) -> Transport:
    """Adds the collectives of its levels to a transport."""

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return network.all_reduce(node.reduce_scatter(mpi_word(x))).astype(x.dtype)  # rounded once

    shards = node._replace(all_reduce=whole.all_reduce, reduce_scatter=reduce_scatter)
    inside = in_two_levels(*(one.inside for one in (whole, node, network, neighbours) if one))
    return whole._replace(levels=ByLevel(shards, node, network, neighbours), inside=inside)


def _two_level_sum(node: Any, network: Any) -> Callable[[jax.Array], jax.Array]:
    """Makes a sum over the ranks of a node, then over those of its place on each node, in the result's own memory."""
    from mpi4py import MPI

    device = jax.local_devices()[0]
    like = receive_buffers()

    def all_reduce(x: jax.Array) -> jax.Array:
        sent = jax.device_get(mpi_word(x))
        received = like(sent)
        messages = np.array_split(sent, MESSAGES)
        totals = np.array_split(received, MESSAGES)
        parts = [np.array_split(total, node.size) for total in totals]
        sizes = [[part.size for part in cut] for cut in parts]
        # On each communicator the calls begin in one order on all ranks, whichever of them is done first.
        running = [
            node.Ireduce_scatter(message, cut[node.rank], size, op=MPI.SUM)
            for message, cut, size in zip(messages, parts, sizes)
        ]
        for k, cut in enumerate(parts):
            _wait_for([running[k]])
            running[k] = network.Iallreduce(MPI.IN_PLACE, cut[node.rank], op=MPI.SUM)
        for k, (total, size) in enumerate(zip(totals, sizes)):
            _wait_for([running[k]])
            running[k] = node.Iallgatherv(MPI.IN_PLACE, [total, size])
        _wait_for(running)
        return jax.device_put(received, device).astype(x.dtype)

    return all_reduce


def _wait_for(requests: Sequence[Any]) -> None:
    """Waits for messages: asks less and less often whether all are done, each time several times in a row.

    MPI works only while it is asked, one step each time, and a message takes many steps. Asked only once, it would
    leave what has arrived unread, and the link idle, until the next time.
    """
    from mpi4py import MPI

    wait = FIRST_WAIT_S
    while not any(MPI.Request.Testall(requests) for _ in range(ASKS)):
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)


def mpi_hosts(comm: Any) -> Hosts:
    """Makes collectives of mpi4py between hosts.

    Args:
      comm: an mpi4py communicator that nothing else uses.

    Returns:
      The hosts.
    """

    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        rows = np.empty((comm.size, data.size), np.uint8)
        comm.Allgather(np.ascontiguousarray(data), rows)
        return rows

    def broadcast(data: Bytes, root: int) -> Bytes:
        data = np.array(data)
        comm.Bcast(data, root=root)
        return data

    return Hosts(all_gather, broadcast)


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
