"""Finds the message that each collective of a compiled step carries, and the collectives that are the loss's own."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from fddp.comm import Placement
from fddp.hlo import Collective
from fddp.schedules import scope


def carried(collectives: Sequence[Collective], names: Iterable[str]) -> tuple[str | None, ...]:
    """Finds the message that each collective carries, by the name that it has inside the program.

    Args:
      collectives: those of the program.
      names: of messages.

    Returns:
      For each collective the name of a message; None for one of the loss's own, and for several that XLA has merged,
      which keep the name of the first.
    """
    scopes = {scope(name): name for name in names}
    if not scopes:
        return (None,) * len(collectives)
    named = re.compile(rf"\b({'|'.join(scopes)})\b")

    def name(collective: Collective) -> str | None:
        found = None if merged(collective) else named.search(collective.op_name)
        return scopes[found[1]] if found else None

    return tuple(map(name, collectives))


def within_replicas(collectives: Sequence[Collective], placement: Placement) -> tuple[bool, ...]:
    """Finds the collectives among the devices of one replica: the loss's own, along other axes of the mesh.

    Args:
      collectives: those of the program.
      placement: of the replicas.

    Returns:
      Whether each is one.
    """
    if not placement.other_axes:
        return (False,) * len(collectives)
    view = placement.view
    replica = np.indices(view.axis_sizes)[view.axis_names.index(placement.axis_name)].reshape(-1)
    everyone = (tuple(range(replica.size)),)
    groups = [one.devices or everyone for one in collectives]
    return tuple(all(len({*replica[[*group]]}) == 1 for group in some) for some in groups)


def merged(collective: Collective) -> bool:
    """Whether it is several in one; an all-to-all has an array for each replica by itself."""
    return len(collective.arrays) > 1 and collective.kind != "all-to-all"
