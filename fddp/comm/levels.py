"""A sum in two levels: over every node first, and then between the nodes.

Replicas of one node reach each other faster than those of another. Each of them sums a part of the array over its node
(reduce-scatter), sums that part with the replicas that have the same place on the other nodes (all-reduce), and gets
the other parts from its node (all-gather). So a node of m sends 2 (m − 1)/m of an array over the network, however many
replicas it has; and a part is summed among the same replicas for all, which gives all of them the same bits.

Source: `HOROVOD_HIERARCHICAL_ALLREDUCE` in Horovod.
"""

import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator, mpi_word
from fddp.comm.transport import Hosts, Transport

# The replicas of each node by their number, equally many.
Nodes: TypeAlias = tuple[tuple[int, ...], ...]
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Levels(NamedTuple):
    """What a backend does for a group that sums in two levels."""

    find: Callable[[], Sequence[Hashable]]
    """The node of each replica, whatever names it; every process calls it, and all get the same."""
    make: Callable[[Nodes], tuple[Communicator, Callable[[int], tuple[Transport, ...]]]]
    """What stands in the place of the group's communicator, and of its `clone`."""


def in_two_levels(whole: Communicator, node: Communicator, network: Communicator) -> Communicator:
    """Makes the sum inside a program go over two levels.

    Args:
      whole: all replicas.
      node: those of this replica's node.
      network: those that have its place on each node.

    Returns:
      The communicator of all; its other collectives are as they were.
    """

    def all_reduce(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        # Summed twice, 16-bit floats would be rounded twice: they go as they do in a sum at once.
        words = (x if whole.native16 else mpi_word(x)).reshape(-1)
        rows = jnp.pad(words, (0, -x.size % node.size)).reshape(node.size, -1)
        part = network.all_reduce(node.reduce_scatter(rows))
        return node.all_gather(part).reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)

    return replace(whole, all_reduce=all_reduce)


def blocks(local: int, replicas: int) -> Nodes:
    """Nodes of so many replicas each, one behind the other.

    Args:
      local: replicas of a node.
      replicas: how many there are.

    Returns:
      The nodes.

    Raises:
      ValueError: `local` does not divide them.
    """
    if isinstance(local, bool) or not isinstance(local, int) or local < 1 or replicas % local:
        raise ValueError(
            f"local must be the number of replicas of a node, equal on all nodes, so a divisor of the {replicas} of "
            f"this group; got {local!r}."
        )
    return tuple(tuple(range(first, first + local)) for first in range(0, replicas, local))


def by_node(found: Sequence[Hashable]) -> Nodes:
    """The replicas of each node.

    Args:
      found: the node of each replica.

    Returns:
      The nodes, in the order of their first replicas.

    Raises:
      ValueError: nodes have unequally many replicas.

    Example:
      >>> by_node(["a", "b", "a", "b"])
      ((0, 2), (1, 3))
    """
    nodes = tuple(tuple(i for i, node in enumerate(found) if node == name) for name in dict.fromkeys(found))
    if len(sizes := sorted({len(node) for node in nodes})) > 1:
        raise ValueError(
            f"the {len(found)} replicas of this group lie on {len(nodes)} nodes, on one {sizes[0]} and on another "
            f"{sizes[-1]}, and a sum in two levels needs equally many on each: start equally many, or give local=, how "
            "many shall count as a node."
        )
    return nodes


def same_places(nodes: Nodes) -> Nodes:
    """The replicas that have one place on their nodes, for each place."""
    return tuple(zip(*nodes))


def hosts_of(hosts: Hosts, processes: Sequence[int]) -> list[bytes]:
    """Finds the host of each replica; every process calls it.

    Args:
      hosts: of the processes.
      processes: the process of each replica, by its place among them.

    Returns:
      Bytes for each replica, equal for those of one host.
    """
    # Containers of one machine have names of their own, and machines may have one name.
    boot = BOOT.read_text() if BOOT.exists() else ""
    mine = sha256(f"{platform.node()} {boot}".encode()).digest()[:8]
    found = hosts.all_gather(np.frombuffer(mine, np.uint8))
    return [found[process].tobytes() for process in processes]
