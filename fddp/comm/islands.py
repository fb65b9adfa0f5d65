"""Islands inside of nodes: sums over an island, the islands of a node, and all nodes.

Source: `HierarchicalModelAverager` in PyTorch.
"""

from dataclasses import replace

from fddp.comm.group import Group
from fddp.comm.levels import islands_of


def islands_in_nodes(group: Group, size: int) -> Group:
    """Adds the level "neighbours" to a group: the replicas at one position in a node's islands.

    Islands are `size` consecutive replicas of a node, and become the nodes of the new group.
    Islands of one replica leave the nodes unchanged, so that a sum over all goes over them first.
    Every process calls it.
    """
    nodes = group.nodes or group.sharing
    islands, neighbours = islands_of(nodes, size)
    nodes = nodes if size == 1 else islands
    communicator, transport, clone = group.levels.on(nodes, neighbours, len(group.transport.clones))
    return replace(group, nodes=nodes, communicator=communicator, transport=transport, clone=clone)
