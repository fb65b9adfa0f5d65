"""Sums in two levels: over every node first, and then between the nodes.

Replicas of one node reach each other faster than those of another. Each replica sums a part of the array over its node
(reduce-scatter), sums that part with the replicas that have the same place on the other nodes (all-reduce), and gets
the other parts from its node (all-gather). So each of m nodes sends 2 (m − 1)/m of an array over the network, however
many replicas it has. Every part is summed once, on the same replicas, so all replicas get the same bits.

The first two of these three make a reduce-scatter of replicas that share a state with their node alone.

Source: `HOROVOD_HIERARCHICAL_ALLREDUCE` in Horovod; `HYBRID_SHARD` of PyTorch's FullyShardedDataParallel.
"""

import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.comm.by_level import ByLevel
from fddp.comm.communicator import Communicator, mpi_word
from fddp.comm.transport import Hosts, Transport

# The numbers of each node's replicas, equally many on every node.
Nodes: TypeAlias = tuple[tuple[int, ...], ...]
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Levels(NamedTuple):
    """Functions of a backend that find nodes, and make the collectives of a group that sums in two levels."""

    find: Callable[[], Sequence[Hashable]]
    """Finds the node of each replica, by any name; every process calls it, and all get the same."""
    make: Callable[[Nodes, Nodes | None], tuple[Communicator, Callable[[int], tuple[Transport, ...]]]]
    """(the replicas of each node, the sets of neighbours) → the communicator and the `clone` that take the place of the
    group's own."""

    def on(
        self, nodes: Nodes, neighbours: Nodes | None, turns: int
    ) -> tuple[Communicator, Transport, Callable[[int], tuple[Transport, ...]]]:
        """Makes the collectives of a group that sums over given nodes first; every process calls it.

        Args:
          nodes: the replicas of each node.
          neighbours: sets of replicas that speak with each other besides, equally many in each; None: there are none.
          turns: the number of transports that take messages in turn; 0: there is one alone.

        Returns:
          The communicator, transport and `clone` that take the place of the group's own.
        """
        communicator, clone = self.make(nodes, neighbours)
        lanes = clone(max(1, turns))
        return communicator, lanes[0]._replace(clones=lanes if turns else ()), clone


def in_two_levels(
    whole: Communicator, node: Communicator, network: Communicator, neighbours: Communicator | None = None
) -> Communicator:
    """Makes sums inside a program go over two levels.

    Args:
      whole: communicator of all replicas.
      node: communicator of this replica's node.
      network: communicator of the replicas that have this one's place on each node.
      neighbours: communicator of the replicas that speak with this one besides.

    Returns:
      The communicator of all, which has those of its levels; its other collectives are as they were.
    """

    def part(rows: Shaped[Array, "local n"]) -> Shaped[Array, " n"]:
        # Summed twice, 16-bit floats would be rounded twice: where a plain sum widens them, this one does so first.
        return network.all_reduce(node.reduce_scatter(rows if whole.native16 else mpi_word(rows)))

    def reduce_scatter(rows: Shaped[Array, "local n"]) -> Shaped[Array, " n"]:
        return part(rows).astype(rows.dtype)

    def all_reduce(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        rows = jnp.pad(x.reshape(-1), (0, -x.size % node.size)).reshape(node.size, -1)
        return node.all_gather(part(rows)).reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)

    shards = replace(node, all_reduce=all_reduce, reduce_scatter=reduce_scatter, nodes=network.size)
    return replace(whole, all_reduce=all_reduce, levels=ByLevel(shards, node, network, neighbours))


def blocks(local: int, replicas: int) -> Nodes:
    """Cuts replicas into nodes of equal size, one behind the other.

    Args:
      local: replicas of a node.
      replicas: number of all replicas.

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
    """Lists the replicas of each node.

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


def islands_of(nodes: Nodes, size: int) -> tuple[Nodes, Nodes]:
    """Cuts nodes into islands of equal size.

    Args:
      nodes: the replicas of each node.
      size: replicas of an island, one behind the other on their node; it divides those of a node.

    Returns:
      The islands; and the neighbours, the replicas of one place in the islands of a node.

    Example:
      >>> islands_of(((0, 1, 2, 3), (4, 5, 6, 7)), 2)
      (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)))
    """
    cut = [tuple(node[at : at + size] for at in range(0, len(node), size)) for node in nodes]
    return tuple(chain.from_iterable(cut)), tuple(chain.from_iterable(map(same_places, cut)))


def same_places(nodes: Nodes) -> Nodes:
    """Lists the replicas that have one place on their nodes, for each place."""
    return tuple(zip(*nodes))


def hosts_of(hosts: Hosts, processes: Sequence[int]) -> list[bytes]:
    """Finds the host of each replica; every process calls it.

    Args:
      hosts: the collectives of the processes.
      processes: the process of each replica, by its place among them.

    Returns:
      Bytes for each replica, equal for those of one host.
    """
    # Two machines may have the same name, and containers of one machine share its boot id: together they tell.
    boot = BOOT.read_text() if BOOT.exists() else ""
    mine = sha256(f"{platform.node()} {boot}".encode()).digest()[:8]
    found = hosts.all_gather(np.frombuffer(mine, np.uint8))
    return [found[process].tobytes() for process in processes]
