"""Sums in two levels: over every node first, and then between the nodes.

Replicas of one node reach each other faster than those of another. Each replica sums a part of the
array over its node (reduce-scatter), sums that part over the replicas at its position on the other
nodes (all-reduce), and receives the other parts from its node (all-gather). So each of m nodes
sends 2 (m − 1)/m of an array over the network, however many replicas it has. Each part is summed
once, on the same replicas, so all replicas have the same bits.

The first two of these three are the reduce-scatter of replicas that share a state with their node
only.

Source: `HOROVOD_HIERARCHICAL_ALLREDUCE` in Horovod; `HYBRID_SHARD` of PyTorch's
FullyShardedDataParallel.
"""

import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.comm.agreement import verify
from fddp.comm.communicator import ByLevel, Communicator, mpi_word
from fddp.comm.transport import Hosts, Transport

if TYPE_CHECKING:  # a group has levels
    from fddp.comm.group import Group

# The numbers of each node's replicas, equally many on every node.
Nodes: TypeAlias = tuple[tuple[int, ...], ...]
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Levels(NamedTuple):
    """Functions of a backend that find nodes and make the collectives of a group with nodes."""

    find: Callable[[], Sequence[Hashable]]
    """Labels the node of each replica, equally on all processes; every process calls it."""
    make: Callable[[Nodes], tuple[Communicator, Transport]]
    """Nodes → communicator and transport of the group with these nodes."""

    def on(self, nodes: Nodes, turns: int) -> tuple[Communicator, Transport]:
        """Makes the communicator and the transport of a group with nodes.

        `turns` is the number of transports for alternate messages; 0: one transport for all. Every
        process calls it.
        """
        communicator, transport = self.make(nodes)
        clones = transport.with_more(turns) if turns else ()
        return communicator, transport._replace(clones=clones)


def in_two_levels(
    plain: Communicator,
    node: Communicator,
    network: Communicator,
) -> Communicator:
    """Adds levels to the communicator of all replicas; its all-reduce goes over nodes first."""

    def part(rows: Shaped[Array, "local n"]) -> Shaped[Array, " n"]:
        # Two sums round 16-bit floats twice: they are widened here where plain sums widen them.
        return network.all_reduce(node.reduce_scatter(rows if plain.native16 else mpi_word(rows)))

    def reduce_scatter(rows: Shaped[Array, "local n"]) -> Shaped[Array, " n"]:
        return part(rows).astype(rows.dtype)

    def all_reduce(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        rows = jnp.pad(x.reshape(-1), (0, -x.size % node.size)).reshape(node.size, -1)
        return node.all_gather(part(rows)).reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)

    shards = replace(node, all_reduce=all_reduce, reduce_scatter=reduce_scatter, nodes=network.size)
    return replace(plain, all_reduce=all_reduce, levels=ByLevel(shards, node, network))


def hierarchical(group: "Group", local: int | None) -> "Group":
    """Implements `Group.hierarchical`."""
    verify(group, "nodes", lambda: _described_nodes(group, local))
    # Every process finds the same nodes, so either all continue or all raise.
    nodes = by_node(group.levels.find()) if local is None else blocks(local, group.size)
    communicator, transport = group.levels.on(nodes, len(group.transport.clones))
    return replace(group, nodes=nodes, communicator=communicator, transport=transport)


def _described_nodes(group: "Group", local: int | None) -> list[str]:
    if axes := group.placement.other_axes:
        raise ValueError(
            "a sum in two levels needs replicas of one device each, and a replica of this "
            f"group is several, along {', '.join(map(repr, axes))}."
        )
    if local is not None:
        blocks(local, group.size)
    return [f"local={local}"]


def blocks(local: int, replicas: int) -> Nodes:
    """Cuts replicas into nodes of `local` consecutive replicas."""
    if isinstance(local, bool) or not isinstance(local, int) or local < 1 or replicas % local:
        raise ValueError(
            "local must be the number of replicas of a node, equal on all nodes, so a divisor of "
            f"the {replicas} of this group; got {local!r}."
        )
    return tuple(tuple(range(first, first + local)) for first in range(0, replicas, local))


def by_node(labels: Sequence[Hashable]) -> Nodes:
    """Lists the replicas of each node from the node labels of all replicas.

    >>> by_node(["a", "b", "a", "b"])
    ((0, 2), (1, 3))
    """
    nodes = tuple(
        tuple(i for i, label in enumerate(labels) if label == name)
        for name in dict.fromkeys(labels)
    )
    if len(sizes := sorted({len(node) for node in nodes})) > 1:
        raise ValueError(
            f"the {len(labels)} replicas of this group lie on {len(nodes)} nodes, on one "
            f"{sizes[0]} and on another {sizes[-1]}, and a sum in two levels needs the same "
            "number on each: start the same number, or give local=, the replicas that count as a "
            "node."
        )
    return nodes


def same_places(nodes: Nodes) -> Nodes:
    """Lists the replicas at each position on their nodes."""
    return tuple(zip(*nodes))


def hosts_of(hosts: Hosts, processes: Sequence[int]) -> list[bytes]:
    """Returns a key of the host of each replica, given their processes; every process calls it."""
    # Machines may share a name, and containers of one machine share its boot id: a key is both.
    boot = ""
    if BOOT.exists():
        boot = BOOT.read_text()
    key = sha256(f"{platform.node()} {boot}".encode()).digest()[:8]
    keys = hosts.all_gather(np.frombuffer(key, np.uint8))
    return [keys[process].tobytes() for process in processes]
