"""The pieces of a step, and what a schedule makes of them.

A step communicates in rounds. Each round makes messages, from the gradients or from what the round before brought back,
and the replicas sum, scatter or gather them. `finish` uses what came back last. A schedule makes a list of tasks from
the pieces and launches it; the mathematics is the pieces' own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.footprint import Footprint
from fddp.schedules.tasks import TaskList
from fddp.schedules.timeline import Timeline


class Round(NamedTuple):
    """Messages that leave together, made from what the round before brought back."""

    name: str
    reads: tuple[str, ...]
    """The arguments that it is given, of "state", "pending", "shards" and "rows"."""
    run: Callable[..., tuple[Messages, Any]]
    """(*what it reads, what came back, what was kept) → what this replica sends, and what it keeps for itself. In the
    first round nothing came back and nothing was kept: None."""
    reductions: tuple[Reduction, ...]
    """The reduction of each message."""
    kind: Literal["compute", "update"] = "update"
    """"compute": the forward and backward pass, which are long: each message leaves as soon as it can be made."""


class Pieces(NamedTuple):
    """A step, per replica."""

    rounds: tuple[Round, ...]
    finish: Callable[[Any, Any, Messages, Any, Any], tuple[Any, Any]]
    """(state, shards, what came back, what was kept, bytes sent per message) → the step's result, equal on all
    replicas, and the shards of the next state."""
    name: str = "update"
    """The name of the task that finishes."""
    uses: Mapping[str, int] = MappingProxyType({})
    """The moment at which the forward pass first uses what a message brings, by the message's name, the same on all
    ranks. Messages that are left out bring what all else waits for."""

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions of all messages, one round after the other."""
        return tuple(reduction for one in self.rounds for reduction in one.reductions)


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Any, Memory, Any], tuple[Any, Any, Memory]]
    """(state, pending, shards, memory, rows) → the step's result, the next shards, and what to remember; state is equal
    everywhere, pending, shards and memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """The spans of the last step, where it is several programs."""
    tasks: Callable[[Any, Any, Any, Any], TaskList]
    """(state, pending, shards, rows), or their forms → what is launched, in order; nothing runs."""
    footprint: Callable[[Any, Any, Any, Memory, Any], Footprint | None] = lambda *arguments: None
    """(state, pending, shards, memory, rows), or their forms → the memory that one replica needs; what was compiled for
    a step is not compiled again. None where XLA does not tell."""
    promises: bool = False
    """Whether a `Promise` may stand for an array of the state, both in what is given and in what comes back."""
    rehearse: Callable[..., None] = lambda *arguments: None
    """(state, pending, shards, rows), as forms of one replica: tries the steps that are due only later."""
    waits: Callable[[Any], bool] = lambda state: True
    """Whether the step that is due waits for all processes of the group."""
    meet: Callable[[Any], Any] = lambda state: state
    """The state, once all islands that do not wait for each other have met; elsewhere the state as it is."""
    inside: Callable[[Any, Any, Any, Memory, Any], tuple[Any, Any, Memory]] | None = None
    """`run` as a part of the user's own program, with the rows of all processes; None: the step needs the host."""


# (group, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule: TypeAlias = Callable[[Group, Pieces, bool], Runner]
# One replica's (state, pending, shards, rows), or their forms -> a step's tasks.
MakeList: TypeAlias = Callable[[Any, Any, Any, Any], TaskList]
