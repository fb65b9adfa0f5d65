"""Groups of the ranks of an MPI communicator, one device each, over mpi4jax and mpi4py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import Communicator, mpi_communicator
from fddp.comm.group import Group
from fddp.comm.journal import Journal
from fddp.comm.mpi_programs import mpi_placement, rank_placement
from fddp.comm.mpi_transport import mpi_send, mpi_transport
from fddp.comm.mpi_words import rank_words
from fddp.comm.placement import Placement
from fddp.comm.program_lane import ProgramLane, library
from fddp.comm.transport import Bytes, Hosts
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
    transport = mpi_transport(comm.Clone())._replace(in_lanes=_in_lanes(comm))
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
    )


def _in_lanes(comm: Any) -> Callable[[int, Journal], tuple[Placement, Communicator]] | None:
    """Makes the programs of lanes, on clones of an mpi4py communicator."""
    if library() is None or comm.size == 1 or jax.default_backend() != "cpu":
        return None

    made = dict[int, tuple[Placement, Communicator]]()

    def make(count: int, journal: Journal) -> tuple[Placement, Communicator]:
        if count in made:
            return made[count]
        token = jax.device_put(np.float32(1), jax.local_devices()[0])
        sends = [mpi_send(comm.Clone()) for _ in range(count)]
        lane = ProgramLane(comm.size, token, sends, journal)
        communicator = lane.communicator(lambda: jnp.int32(comm.rank))
        words = rank_words(comm.rank, comm.size, communicator)
        made[count] = lane.placement(rank_placement(comm.size), words), communicator
        return made[count]

    return make


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
