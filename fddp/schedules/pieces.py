"""The pieces of a step, and what a schedule makes of them.

`local` makes a replica's gradients and packs them, a reduction makes each message's sum over replicas, `finish` uses
them. Between the two a step may speak again of what came back: each round makes messages of the last one's. A schedule
makes a list of tasks of the pieces and launches it; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.tasks import TaskList
from fddp.schedules.timeline import Timeline


class Round(NamedTuple):
    """What is made of messages that came back, and sent again."""

    name: str
    run: Callable[[Any, Any, Messages, Any], tuple[Messages, Any]]
    """(state, shards, what came back, what was kept) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Messages, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]
    """How each message is summed."""
    finish: Callable[[Any, Messages, Any, Any], tuple[Any, Any]]
    """(state, what came back, what was kept, bytes sent per message) → the step's result, equal on all replicas, and
    the shards of the next state."""
    rounds: tuple[Round, ...] = ()

    @property
    def spoken(self) -> list[tuple[Reduction, ...]]:
        """The reductions of one round after the other."""
        return [self.reductions, *(one.reductions for one in self.rounds)]


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Any, Memory, Any], tuple[Any, Any, Memory]]
    """(state, pending, shards, memory, rows) → the step's result, the next shards, and what to remember; state is equal
    everywhere, pending, shards and memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """When the last step computed and communicated, where it is several programs."""
    tasks: Callable[[Any, Any, Any, Any], TaskList]
    """(state, pending, shards, rows), or their forms → what is launched, in order; nothing runs."""


# (group, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule: TypeAlias = Callable[[Group, Pieces, bool], Runner]
# One replica's (state, pending, shards, rows), or their forms -> a step's tasks.
MakeList: TypeAlias = Callable[[Any, Any, Any, Any], TaskList]
