"""Three pieces of a step, and what a schedule makes of them.

`local` makes a replica's gradients and packs them, a reduction makes each message's sum over replicas, `finish` uses
them. A schedule makes a list of tasks of them and launches it; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.tasks import TaskList
from fddp.schedules.timeline import Timeline


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Messages, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]
    """How each message is summed."""
    finish: Callable[[Any, Messages, Any, Any], Any]
    """(state, what came back, what was kept, bytes sent per message) → the step's result, equal on all replicas."""


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Memory, Any], tuple[Any, Memory]]
    """(state, pending, memory, rows) → the step's result, and what to remember; state is equal everywhere, pending and
    memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """When the last step computed and communicated, where it is several programs."""
    tasks: Callable[[Any, Any, Any], TaskList]
    """(state, pending, rows), or their forms → what is launched, in order; nothing runs."""


# (group, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule: TypeAlias = Callable[[Group, Pieces, bool], Runner]
# One replica's (state, pending, rows), or their forms -> a step's tasks.
MakeList: TypeAlias = Callable[[Any, Any, Any], TaskList]
