"""The carriers of messages while programs compute, and of bytes between their hosts."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import Communicator
from fddp.comm.journal import Journal
from fddp.comm.placement import Placement

Bytes: TypeAlias = UInt8[np.ndarray, " n"]
# (count, journal) → the placement and the communicator of programs whose messages travel in `count`
# lanes while they compute
MakeLanes: TypeAlias = Callable[[int, Journal], tuple[Placement, Communicator]]


class Transport(NamedTuple):
    """Carries messages while XLA's programs compute."""

    in_lanes: MakeLanes | None = None
    """Makes lanes; None: the placement's programs overlap by themselves, or not at all."""
    lanes: int = 1
    """The number of lanes of a step."""
    local: int | None = None
    """Replicas per host, if sums go over hosts first; None: over all replicas at once."""


class Hosts(NamedTuple):
    """The processes of a group, and their collectives."""

    ranks: tuple[int, ...]
    """Numbers of the processes in the whole job, in order of rank."""
    all_gather: Callable[[Bytes], UInt8[np.ndarray, "processes n"]]
    """Gathers equally many bytes from every process, on every process."""
    broadcast: Callable[[Bytes, int], Bytes]
    """`broadcast(data, root)`: copies the root's bytes to every process."""
