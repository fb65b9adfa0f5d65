"""Groups of the ranks of an MPI communicator, one device each, over mpi4jax and mpi4py."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import ByLevel, Communicator, mpi_communicator, mpi_word
from fddp.comm.group import Group
from fddp.comm.levels import Levels, Nodes, in_two_levels, same_places
from fddp.comm.mpi_programs import mpi_placement, rank_placement
from fddp.comm.mpi_transport import (
    MESSAGES,
    mpi_send,
    mpi_transport,
    poll_until_done,
    receive_buffers,
)
from fddp.comm.mpi_words import rank_words
from fddp.comm.placement import Placement
from fddp.comm.program_lane import ProgramLane, library
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.wording import check_has


def mpi_group(comm: Any) -> Group:
    """Makes a group of the ranks of an mpi4py communicator, one device each.

    Args:
      comm: the communicator; the group uses clones of it.

    Returns:
      The group.

    Raises:
      RuntimeError: this process has several devices.
    """
    if jax.local_device_count() > 1:
        raise RuntimeError(
            "backend 'mpi' drives one device per process, and this process has "
            f"{jax.local_device_count()}: start one process per device, or use backend 'gloo'."
        )
    check_has("Clone", "mpi_group: comm", comm, "a communicator of mpi4py")

    # Each kind of message has a communicator, so that two kinds never meet: messages inside
    # programs (mpi4jax), of a loss, between programs, of the hosts, and the user's.
    transport = mpi_transport(comm.Clone())._replace(
        in_lane=_in_lane(comm.Clone()),
        more=lambda count: tuple(mpi_transport(comm.Clone()) for _ in range(count)),
    )
    communicator = mpi_communicator(comm.Clone())
    hosts = mpi_hosts(comm.Clone())
    return Group(
        rank=comm.rank,
        size=comm.size,
        backend="mpi",
        placement=mpi_placement(comm.Clone()),
        communicator=communicator,
        transport=transport,
        hosts=hosts,
        make_subgroup=lambda ranks: mpi_group(
            comm.Create_group(comm.Get_group().Incl(list(ranks)))
        ),
        levels=mpi_levels(comm, communicator, hosts),
    )


def _in_lane(comm: Any) -> Callable[[], tuple[Placement, Communicator]] | None:
    """Makes the programs of a lane, on an mpi4py communicator without other users."""
    if library() is None or comm.size == 1 or jax.default_backend() != "cpu":
        return None

    @functools.cache
    def make() -> tuple[Placement, Communicator]:
        token = jax.device_put(np.float32(1), jax.local_devices()[0])
        lane = ProgramLane(comm.size, token, mpi_send(comm))
        communicator = lane.communicator(lambda: jnp.int32(comm.rank))
        words = rank_words(comm.rank, comm.size, communicator)
        return lane.placement(rank_placement(comm.size), words), communicator

    return make


def mpi_levels(comm: Any, communicator: Communicator, hosts: Hosts) -> Levels:
    """Makes the levels of the ranks of an mpi4py communicator."""
    from mpi4py import MPI

    def find() -> list[int]:
        shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = np.array([shared.bcast(comm.rank)])
        shared.Free()
        return hosts.all_gather(first.view(np.uint8)).view(first.dtype).ravel().tolist()

    def make(nodes: Nodes) -> tuple[Communicator, Transport]:
        def split() -> list[Any]:
            partitions = (nodes, same_places(nodes))
            positions = [
                (k, subset.index(comm.rank))
                for subsets in partitions
                for k, subset in enumerate(subsets)
                if comm.rank in subset
            ]
            return [comm.Split(color, key) for color, key in positions]

        def carrier() -> Transport:
            subset_comms = split()
            node, network = subset_comms[:2]
            plain = mpi_transport(comm.Clone())._replace(all_reduce=_two_level_sum(node, network))
            return _with_levels(plain, *map(mpi_transport, subset_comms))

        transport = carrier()._replace(more=lambda count: tuple(carrier() for _ in range(count)))
        two_level = in_two_levels(communicator, *map(mpi_communicator, split()))
        return two_level, transport

    return Levels(find, make)


def _with_levels(plain: Transport, node: Transport, network: Transport) -> Transport:
    """Adds the collectives of its levels to a transport."""

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return network.all_reduce(node.reduce_scatter(mpi_word(x))).astype(x.dtype)  # rounded once

    shards = node._replace(all_reduce=plain.all_reduce, reduce_scatter=reduce_scatter)
    inside = in_two_levels(plain.inside, node.inside, network.inside)
    return plain._replace(levels=ByLevel(shards, node, network), inside=inside)


def _two_level_sum(node: Any, network: Any) -> Callable[[jax.Array], jax.Array]:
    """Makes a sum over a node's ranks, then over those at each position, in the result's memory."""
    from mpi4py import MPI

    device = jax.local_devices()[0]
    like = receive_buffers()

    def all_reduce(x: jax.Array) -> jax.Array:
        summand = jax.device_get(mpi_word(x))
        received = like(summand)
        messages = np.array_split(summand, MESSAGES)
        totals = np.array_split(received, MESSAGES)
        shards = [np.array_split(total, node.size) for total in totals]
        sizes = [[shard.size for shard in cut] for cut in shards]
        # On each communicator the calls begin in one order on all ranks, whichever of them ends
        # first.
        running = [
            node.Ireduce_scatter(message, cut[node.rank], size, op=MPI.SUM)
            for message, cut, size in zip(messages, shards, sizes)
        ]
        for k, cut in enumerate(shards):
            poll_until_done([running[k]])
            running[k] = network.Iallreduce(MPI.IN_PLACE, cut[node.rank], op=MPI.SUM)
        for k, (total, size) in enumerate(zip(totals, sizes)):
            poll_until_done([running[k]])
            running[k] = node.Iallgatherv(MPI.IN_PLACE, [total, size])
        poll_until_done(running)
        return jax.device_put(received, device).astype(x.dtype)

    return all_reduce


def mpi_hosts(comm: Any) -> Hosts:
    """Makes the collectives of hosts on an mpi4py communicator without other users."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    ranks = tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, world))

    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        rows = np.empty((comm.size, data.size), np.uint8)
        comm.Allgather(np.ascontiguousarray(data), rows)
        return rows

    def broadcast(data: Bytes, root: int) -> Bytes:
        data = np.array(data)
        comm.Bcast(data, root=root)
        return data

    return Hosts(ranks, all_gather, broadcast)
