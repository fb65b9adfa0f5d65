"""Collectives that move arrays between the programs of replicas, and bytes between their hosts."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import Communicator
from fddp.comm.placement import Placement

Bytes: TypeAlias = UInt8[np.ndarray, " n"]


class Transport(NamedTuple):
    """Collectives between programs; they block the calling thread."""

    all_reduce: Callable[[jax.Array], jax.Array]
    """Sums the flat arrays of all replicas."""
    reduce_scatter: Callable[[jax.Array], jax.Array]
    """Sums them, and returns an equal part of the sum to each replica."""
    all_gather: Callable[[jax.Array], jax.Array]
    """Concatenates the flat arrays of all replicas on every replica."""
    tree_reduce: Callable[[jax.Array, int], jax.Array]
    """`tree_reduce(x, blocks)`: sums all blocks of all replicas in the tree of virtual replicas;
    `x` is this replica's blocks, concatenated."""
    inside: Communicator
    """Collectives inside a program that sends one message while other programs compute."""
    program: Callable[..., Callable[..., Any]] | None = None
    """Compiles such a program, like `Placement.program`; None: the placement compiles it."""
    in_lane: Callable[[], tuple[Placement, Communicator]] | None = None
    """Makes the placement and the communicator of programs whose messages travel while they
    compute; None: the placement's programs overlap by themselves, or not at all."""
    clones: "tuple[Transport, ...]" = ()
    """Concurrent transports for alternate messages; empty: this transport sends all."""
    more: "Callable[[int], tuple[Transport, ...]]" = lambda count: ()
    """`more(count)`: makes up to `count` transports that may send while this one does."""
    local: int | None = None
    """Replicas per host, if sums go over hosts first; None: over all replicas at once."""

    def with_more(self, count: int) -> "tuple[Transport, ...]":
        """Returns this transport and concurrent ones: `count` in all, or what the backend has."""
        return (self, *self.more(count - 1))


class Hosts(NamedTuple):
    """The processes of a group, and their collectives."""

    ranks: tuple[int, ...]
    """Numbers of the processes in the whole job, in order of rank."""
    all_gather: Callable[[Bytes], UInt8[np.ndarray, "processes n"]]
    """Gathers equally many bytes from every process, on every process."""
    broadcast: Callable[[Bytes, int], Bytes]
    """`broadcast(data, root)`: copies the root's bytes to every process."""
