"""The lane of processes on a mesh, with one device each: programs over it, messages over TCP."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from fddp.comm.communicator import Communicator
from fddp.comm.journal import Journal
from fddp.comm.mpi_words import rank_words
from fddp.comm.placement import REPLICATED, Placement
from fddp.comm.program_lane import ProgramLane
from fddp.comm.rank_connections import connect_ranks
from fddp.comm.socket_send import SocketSend
from fddp.comm.transport import Hosts
from fddp.jax_internals import gloo_host


def mesh_lanes(
    placement: Placement, rank: int, hosts: Hosts, levels: Sequence[Sequence[int]] = ()
) -> Callable[[int, Journal], tuple[Placement, Communicator]]:
    """Makes the programs of as many lanes, once, when all processes first need them.

    `levels` are as in `SocketSend`.
    """

    made = dict[int, tuple[Placement, Communicator]]()

    def make(count: int, journal: Journal) -> tuple[Placement, Communicator]:
        if count in made:
            return made[count]
        axis, size = str(placement.axis_name), placement.axis_size
        sends = list[SocketSend]()
        for _ in range(count):
            connections = connect_ranks(rank, hosts, gloo_host())
            sends.append(SocketSend(rank, connections, levels, hosts.ranks))
        lane = ProgramLane(size, placement.place(np.float32(1), REPLICATED), sends, journal)
        communicator = lane.communicator(lambda: jax.lax.axis_index(axis))
        words = rank_words(rank, size, communicator)
        made[count] = lane.placement(placement, words), communicator
        return made[count]

    return make
