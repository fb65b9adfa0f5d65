"""Groups of local steps: their nodes are the islands, or contain them."""

from fddp.comm import Group, islands_in_nodes
from fddp.optim import LocalSteps, Optimizer


def in_islands(group: Group, optimizer: Optimizer) -> Group:
    """Makes each island a node of the group, or subdivides nodes into islands; collective.

    Islands of one replica leave the nodes unchanged. It raises ValueError if islands do not divide
    the nodes, or the group needs nodes and has none.
    """
    if not isinstance(optimizer, LocalSteps):
        return group
    island = optimizer.island
    if group.nodes is None:
        if island == "node":
            raise ValueError(
                "local_steps: island='node' needs a group with nodes: give the step "
                "group.hierarchical()."
            )
        if optimizer.node is not None:
            raise ValueError(
                "local_steps: every has a period of 'node', which needs a group with nodes: give "
                "the step group.hierarchical()."
            )
        return group if island == 1 else group.hierarchical(island)
    size = len(group.nodes[0]) if island == "node" else island
    if len(group.nodes[0]) % size:
        raise ValueError(
            f"local_steps: island={island}, and the nodes of this group have {group.local} "
            "replicas: give island='node', a divisor of their number, or the plain group."
        )
    unchanged = size in (1, group.local) and optimizer.node is None
    return group if unchanged else islands_in_nodes(group, size)


def as_islands_of(template: Group, group: Group, optimizer: Optimizer) -> Group:
    """Divides a group into nodes and islands as in `template`, from `in_islands`; collective.

    A group with nodes keeps them.
    """
    size = template.local
    if isinstance(optimizer, LocalSteps) and optimizer.node is not None:
        size = optimizer.replicas(template.parts) * template.communicator.at("neighbours").size
    return in_islands(group if size is None or group.nodes else group.hierarchical(size), optimizer)
