"""The replicas that a collective is for: all of a group, or some of them among themselves.

Where sums go over nodes first, replicas of one node speak with each other, and so do those of one place on each node.
"""

from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

Level: TypeAlias = Literal["all", "shards", "node", "network", "neighbours"]
Carrier = TypeVar("Carrier")


class ByLevel(NamedTuple, Generic[Carrier]):
    """The collectives of some replicas of a group."""

    shards: Carrier
    """All replicas, and the parts are those of a node: a sum that is scattered over a node goes on between nodes."""
    node: Carrier
    """The replicas of this one's node."""
    network: Carrier
    """The replicas that have this one's place, one on each node."""
    neighbours: Carrier | None = None
    """The replicas that have this one's place, one in each island of its node, where nodes have several islands; see
    `islands_in_nodes`."""
