"""The groups of local steps: their nodes are the islands, or hold them."""

from fddp.comm import Group, islands_in_nodes
from fddp.optim import LocalSteps, Optimizer


def in_islands(group: Group, optimizer: Optimizer) -> Group:
    """Makes nodes of the islands of local steps, or cuts nodes into islands; every process calls it.

    Args:
      group: the replicas.
      optimizer: of the step.

    Returns:
      The group, whose nodes are the islands; where each replica is one, as it is.

    Raises:
      ValueError: the group has no nodes, or islands do not divide them.
    """
    if not isinstance(optimizer, LocalSteps):
        return group
    island = optimizer.island
    if group.nodes is None:
        if island == "node":
            raise ValueError("local_steps: island='node' needs a group with nodes: give the step group.hierarchical().")
        if optimizer.node is not None:
            raise ValueError(
                "local_steps: every has a period of 'node', which needs a group with nodes: give the step "
                "group.hierarchical()."
            )
        return group if island == 1 else group.hierarchical(island)
    size = len(group.nodes[0]) if island == "node" else island
    if len(group.nodes[0]) % size:
        raise ValueError(
            f"local_steps: island={island}, and the nodes of this group have {group.local} replicas: give "
            "island='node', a divisor of their number, or the plain group."
        )
    alike = size in (1, group.local) and optimizer.node is None
    return group if alike else islands_in_nodes(group, size)


def as_islands_of(known: Group, group: Group, optimizer: Optimizer) -> Group:
    """Makes islands, and nodes, like those of another group; every process calls it.

    Args:
      known: a group that `in_islands` has made.
      group: the replicas; if it has no nodes, and that had some, it gets nodes of as many.
      optimizer: of the step.

    Returns:
      The group.

    Raises:
      ValueError: as for `in_islands`; or its replicas cannot be in nodes of as many.
    """
    size = known.local
    if isinstance(optimizer, LocalSteps) and optimizer.node is not None:
        size = optimizer.replicas(known.parts) * known.communicator.at("neighbours").size
    return in_islands(group if size is None or group.nodes else group.hierarchical(size), optimizer)
