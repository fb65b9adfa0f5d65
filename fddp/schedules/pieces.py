"""The pieces of a step, from which a schedule makes a list of tasks.

A step communicates in rounds. Each round makes messages, from the gradients or from the sums of the
previous round, and the replicas reduce, reduce-scatter or gather them. `finish` uses the last sums.
A schedule makes a list of tasks from the pieces and launches it; the mathematics is in the pieces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.tasks import TaskList
from fddp.schedules.timeline import Timeline
from fddp.schedules.values import SHARDS, STATE

# The arguments that a round may take.
ARGUMENTS = (STATE, "pending", SHARDS, "rows")


class Round(NamedTuple):
    """Messages that leave together, made from the sums of the previous round."""

    name: str
    reads: tuple[str, ...]
    """The arguments that it takes, some of `ARGUMENTS`."""
    run: Callable[..., tuple[Messages, Any]]
    """(*arguments, sums, saved values) → this replica's messages, and the values it saves for the
    next round. In the first round the sums and the saved values are None."""
    reductions: tuple[Reduction, ...]
    """The reduction of each message."""
    kind: Literal["compute", "update"] = "update"
    """"compute": the forward and backward pass, where a message leaves as soon as it is ready."""


class Pieces(NamedTuple):
    """A step, per replica."""

    rounds: tuple[Round, ...]
    finish: Callable[[Any, Any, Messages, Any, Any], tuple[Any, Any]]
    """(state, shards, sums, saved values, bytes sent per message) → the step's result, equal on all
    replicas, and the shards of the next state."""
    name: str = "update"
    """The name of the last task."""
    uses: Mapping[str, int] = MappingProxyType({})
    """Message → position of its first use in the forward pass, equal on all ranks. The message that
    carries the scalars is omitted: every update waits for it."""

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions of all messages, one round after the other."""
        return tuple(reduction for piece in self.rounds for reduction in piece.reductions)


class StepInputs(NamedTuple):
    """The arrays of a step, or their shapes."""

    state: Any
    """The replicated part of the state."""
    pending: Any
    """Each replica's sums from earlier calls of `no_sync`."""
    shards: Any
    """Each replica's shards of the state."""
    memory: Memory
    """Each replica's memory of the hooks, by message."""
    rows: Any
    """The rows of this process, on any device."""


class StepOutputs(NamedTuple):
    """The results of a step."""

    result: Any
    """The next state and the report, replicated."""
    shards: Any
    memory: Memory


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[StepInputs], StepOutputs]
    lower: Callable[[StepInputs], jax.stages.Lowered] | None
    """The lowered step, if it is one program."""
    timeline: Callable[[], Timeline] | None
    """The spans of the last step, if it is several programs."""
    tasks: Callable[[Any, Any, Any, Any], TaskList] | None
    """(state, pending, shards, rows), or their shapes → the tasks in order; nothing runs. None: it
    is no list of tasks."""
    promises: bool = False
    """True if a `Promise` may stand for an array of the state, as argument and as result."""
    inside: Callable[[StepInputs], StepOutputs] | None = None
    """`run` as a part of the user's own program, with the rows of all processes; None if the step
    needs the host."""


# (group, pieces, donate) -> runner; donate: True if the step may reuse the state's memory
MakeRunner: TypeAlias = Callable[[Group, Pieces, bool], Runner]
# One replica's (state, pending, shards, rows), or their shapes -> a step's tasks.
MakeList: TypeAlias = Callable[[Any, Any, Any, Any], TaskList]


@dataclass(frozen=True)
class Schedule:
    """Turns the pieces of a step into tasks, and launches these."""

    name: str
    make: MakeRunner
    one_program: bool = False
    """True if the step is one XLA program."""
    cuts: bool = True
    """True if messages may leave before the backward pass ends."""
    launch: Callable[..., Runner] | None = None
    """(group, `MakeList`, donate, `MakePrograms`) → the runner of any list, if it can run any."""

    def __call__(self, group: Group, pieces: Pieces, donate: bool) -> Runner:
        return self.make(group, pieces, donate)
