"""Transports, which move arrays between the programs of replicas, and bytes between their hosts."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import UInt8

from fddp.comm.by_level import ByLevel, Level
from fddp.comm.communicator import Communicator

Bytes: TypeAlias = UInt8[np.ndarray, " n"]


class Transport(NamedTuple):
    """Collectives between programs; they block the calling thread."""

    all_reduce: Callable[[jax.Array], jax.Array]
    """Sums the flat arrays of all replicas."""
    reduce_scatter: Callable[[jax.Array], jax.Array]
    """Sums them, and cuts the sum into equal parts, of which each replica gets its own."""
    all_gather: Callable[[jax.Array], jax.Array]
    """Joins the flat arrays of all replicas, one behind the other, on every replica."""
    tree_reduce: Callable[[jax.Array, int], jax.Array]
    """`tree_reduce(x, blocks)`: sums all blocks of all replicas in the tree of virtual replicas; a replica's blocks
    lie in `x`, flat, one behind the other."""
    inside: Communicator
    """The collectives inside of a program that sends one message, while other programs compute."""
    clones: "tuple[Transport, ...]" = ()
    """Transports whose collectives may run side by side, and which take messages in turn; empty: this one alone."""
    levels: "ByLevel[Transport] | None" = None
    """The collectives of some of the replicas; None: all are one node."""

    def at(self, level: Level) -> "Transport":
        """Gives the collectives of some of the replicas; where all are one node, of all."""
        return self if level == "all" or self.levels is None else getattr(self.levels, level)


class Hosts(NamedTuple):
    """Collectives of the processes themselves."""

    all_gather: Callable[[Bytes], UInt8[np.ndarray, "processes n"]]
    """Gathers equally many bytes from every process, on every process."""
    broadcast: Callable[[Bytes, int], Bytes]
    """`broadcast(data, root)`: gives every process the root's bytes."""
