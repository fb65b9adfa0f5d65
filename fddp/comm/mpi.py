"""Groups of the ranks of an MPI communicator, one device each, over mpi4jax and mpi4py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import mpi_communicator
from fddp.comm.group import Group
from fddp.comm.lane_thread import library
from fddp.comm.lanes import lanes
from fddp.comm.mpi_programs import mpi_placement, rank_placement
from fddp.comm.mpi_transport import mpi_send
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
    # programs (mpi4jax), of a loss, of the hosts, of each lane, and the user's.
    in_lanes = None
    if library() and comm.size > 1 and jax.default_backend() == "cpu":
        index = lambda: jnp.int32(comm.rank)  # noqa: E731
        placement = rank_placement(comm.size)
        in_lanes = lanes(placement, comm.rank, index, lambda: mpi_send(comm.Clone()))
    communicator = mpi_communicator(comm.Clone())
    hosts = mpi_hosts(comm.Clone())
    return Group(
        rank=comm.rank,
        size=comm.size,
        backend="mpi",
        placement=mpi_placement(comm.Clone()),
        communicator=communicator,
        transport=Transport(in_lanes),
        hosts=hosts,
        make_subgroup=lambda ranks: mpi_group(
            comm.Create_group(comm.Get_group().Incl(list(ranks)))
        ),
    )


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
