"""Levels of a collective: all replicas of a group, or subsets of them.

Where sums go over nodes first, the subsets are the replicas of one node, and the replicas at one
position on each node.
"""

from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

Level: TypeAlias = Literal["all", "shards", "node", "network", "neighbours"]
Carrier = TypeVar("Carrier")


class ByLevel(NamedTuple, Generic[Carrier]):
    """Collectives of one replica at each level below all replicas."""

    shards: Carrier
    """All replicas, with parts per node: a sum that is scattered over a node continues between
    nodes."""
    node: Carrier
    """The replicas of this replica's node."""
    network: Carrier
    """The replicas at this replica's position, one on each node."""
    neighbours: Carrier | None = None
    """The replicas at this replica's position, one in each island of its node; None: a node is one
    island, see `islands_in_nodes`."""
