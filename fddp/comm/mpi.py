"""Groups of replicas that are ranks of an MPI communicator, one device each, over mpi4jax and mpi4py."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from fddp.comm.by_level import ByLevel
from fddp.comm.communicator import Communicator, mpi_communicator, mpi_word
from fddp.comm.group import Group
from fddp.comm.levels import Levels, Nodes, in_two_levels, same_places
from fddp.comm.mpi_programs import mpi_placement
from fddp.comm.mpi_transport import MESSAGES, mpi_transport, receive_buffers, wait_for
from fddp.comm.recovery import Recovery, mpi_meet
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.wording import check_has


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
    check_has("Clone", "mpi_group: comm", comm, "a communicator of mpi4py")

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
            wait_for([running[k]])
            running[k] = network.Iallreduce(MPI.IN_PLACE, cut[node.rank], op=MPI.SUM)
        for k, (total, size) in enumerate(zip(totals, sizes)):
            wait_for([running[k]])
            running[k] = node.Iallgatherv(MPI.IN_PLACE, [total, size])
        wait_for(running)
        return jax.device_put(received, device).astype(x.dtype)

    return all_reduce


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
