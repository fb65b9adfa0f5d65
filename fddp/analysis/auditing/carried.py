"""Identifies the message of each collective in a compiled step, and the loss's own collectives."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from fddp.comm import Placement
from fddp.hlo import Collective
from fddp.schedules import scope


def carried(collectives: Sequence[Collective], names: Iterable[str]) -> tuple[str | None, ...]:
    """Returns the message name of each collective, from its named scope in the program.

    It is None for a collective of the loss and for a merged one: XLA retains only the first name.
    """
    scopes = {scope(name): name for name in names}
    named = re.compile(rf"\b({'|'.join(scopes)})\b")
    messages = list[str | None]()
    for collective in collectives:
        match = named.search(collective.op_name)
        messages.append(None)
        if match and not merged(collective):
            messages[-1] = scopes.get(match[1])
    return tuple(messages)


def within_replicas(collectives: Sequence[Collective], placement: Placement) -> tuple[bool, ...]:
    """Returns True for each collective inside a replica, along other axes of the mesh."""
    if not placement.other_axes:
        return (False,) * len(collectives)
    view = placement.view
    replica = np.indices(view.axis_sizes)[view.axis_names.index(placement.axis_name)].reshape(-1)
    everyone = (tuple(range(replica.size)),)

    def within(collective: Collective) -> bool:
        groups = collective.devices or everyone
        return all(len({*replica[[*devices]]}) == 1 for devices in groups)

    return tuple(map(within, collectives))


def merged(collective: Collective) -> bool:
    """Returns True if XLA has merged several collectives into this one."""
    # An all-to-all has an array per replica anyway.
    return len(collective.arrays) > 1 and collective.kind != "all-to-all"
