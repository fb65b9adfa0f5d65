"""The pieces of a step, and what a schedule makes of them.

A step speaks in rounds: each makes messages, of the gradients or of what came back of the messages before, and the
replicas sum, scatter or gather them; `finish` uses what came back last. A schedule makes a list of tasks of the pieces
and launches it; the mathematics is the pieces' own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.tasks import TaskList
from fddp.schedules.timeline import Timeline


class Round(NamedTuple):
    """What is made of what came back before, and sent."""

    name: str
    reads: tuple[str, ...]
    """Which of "state", "pending", "shards" and "rows" it is given."""
    run: Callable[..., tuple[Messages, Any]]
    """(*what it reads, what came back, what was kept) → what this replica sends, and what it keeps for itself; nothing
    has come back or was kept before the first round: None."""
    reductions: tuple[Reduction, ...]
    """How each message is summed."""
    kind: Literal["compute", "update"] = "update"
    """"compute": the forward and backward pass, which are long: each message leaves as soon as it can be made."""


class Pieces(NamedTuple):
    """A step, per replica."""

    rounds: tuple[Round, ...]
    finish: Callable[[Any, Any, Messages, Any, Any], tuple[Any, Any]]
    """(state, shards, what came back, what was kept, bytes sent per message) → the step's result, equal on all
    replicas, and the shards of the next state."""
    name: str = "update"
    """What finishing is called."""
    uses: Mapping[str, int] = MappingProxyType({})
    """When the forward pass first uses what a message brings, by the message's name, the same on all ranks; those that
    are left out bring what all else waits for."""

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """How the messages are summed, of one round after the other."""
        return tuple(reduction for one in self.rounds for reduction in one.reductions)


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
    promises: bool = False
    """Whether of the state a `Promise` may be given and come back in place of an array."""
    rehearse: Callable[..., None] = lambda *arguments: None
    """(state, pending, shards, rows), as forms of one replica: tries the steps that are due only later."""


# (group, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule: TypeAlias = Callable[[Group, Pieces, bool], Runner]
# One replica's (state, pending, shards, rows), or their forms -> a step's tasks.
MakeList: TypeAlias = Callable[[Any, Any, Any, Any], TaskList]
