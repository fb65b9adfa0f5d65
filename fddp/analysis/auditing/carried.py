"""Which message of a step each collective of its compiled program carries."""

import re
from collections.abc import Sequence

from fddp.hlo import Collective
from fddp.schedules import Communicate, scope


def carried(collectives: Sequence[Collective], sends: Sequence[Communicate]) -> tuple[str | None, ...]:
    """Finds the message that each collective carries, by the name that it has inside the program.

    Args:
      collectives: those of the program.
      sends: the tasks of the step that send.

    Returns:
      For each collective the name of a message; None for one of the loss's own, and for several that XLA has merged,
      which keep the name of the first.
    """
    scopes = {scope(task): task.name for task in sends}
    if not scopes:
        return (None,) * len(collectives)
    named = re.compile(rf"\b({'|'.join(scopes)})\b")

    def name(collective: Collective) -> str | None:
        found = None if merged(collective) else named.search(collective.op_name)
        return scopes[found[1]] if found else None

    return tuple(map(name, collectives))


def merged(collective: Collective) -> bool:
    """Whether it is several in one; an all-to-all has an array for each replica by itself."""
    return len(collective.arrays) > 1 and collective.kind != "all-to-all"
