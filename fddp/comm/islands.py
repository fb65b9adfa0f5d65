"""Islands inside of nodes: three levels, the replicas of an island, the islands of a node, and all.

Source: `HierarchicalModelAverager` in PyTorch.
"""

from dataclasses import replace

from fddp.comm.group import Group
from fddp.comm.levels import islands_of


def islands_in_nodes(group: Group, size: int) -> Group:
    """Makes a group that knows the islands of each node; every process calls it.

    Args:
      group: one with nodes.
      size: replicas of an island, one behind the other on their node; it divides those of a node.

    Returns:
      The group, with the level "neighbours": the replicas of one place in the islands of a node. Its nodes are the
      islands; where an island is one replica they are as they were, so that a sum over all goes over them first.
    """
    nodes = group.nodes or group.sharing
    islands, neighbours = islands_of(nodes, size)
    nodes = nodes if size == 1 else islands
    communicator, transport, clone = group.levels.on(nodes, neighbours, len(group.transport.clones))
    return replace(group, nodes=nodes, communicator=communicator, transport=transport, clone=clone)
