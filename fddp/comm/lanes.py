"""The programs of a group's lanes, made when all processes first need them."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from fddp.comm.communicator import Communicator
from fddp.comm.journal import Journal
from fddp.comm.lane_thread import Send
from fddp.comm.loss_collectives import rank_words
from fddp.comm.placement import REPLICATED, Placement
from fddp.comm.program_lane import ProgramLane
from fddp.comm.rank_connections import connect_ranks
from fddp.comm.socket_send import SocketSend
from fddp.comm.transport import Hosts, MakeLanes
from fddp.jax_internals import gloo_host


def lanes(
    placement: Placement,
    rank: int,
    replica_index: Callable[[], jax.Array],
    connect: Callable[[], Send],
) -> MakeLanes:
    """Makes the programs of as many lanes as a caller needs; `connect` connects a lane."""
    by_count = dict[int, tuple[Placement, Communicator]]()

    def make(count: int, journal: Journal) -> tuple[Placement, Communicator]:
        if count not in by_count:
            token = placement.place(np.float32(1), REPLICATED)
            sends = [connect() for _ in range(count)]
            lane = ProgramLane(placement.axis_size, token, sends, journal)
            communicator = lane.communicator(replica_index)
            words = rank_words(rank, placement.axis_size, communicator)
            by_count[count] = lane.placement(placement, words), communicator
        return by_count[count]

    return make


def mesh_lanes(
    placement: Placement, rank: int, hosts: Hosts, levels: Sequence[Sequence[int]] = ()
) -> MakeLanes:
    """Makes lanes over TCP for processes on a mesh; `levels` are as in `SocketSend`."""

    def connect() -> SocketSend:
        return SocketSend(rank, connect_ranks(rank, hosts, gloo_host()), levels, hosts.ranks)

    axis = str(placement.axis_name)
    return lanes(placement, rank, lambda: jax.lax.axis_index(axis), connect)
