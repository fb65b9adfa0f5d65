"""The pieces of a step, from which a schedule makes a program.

A step communicates in phases. Each phase makes messages, from the gradients or from the sums of the
previous phase, and the replicas reduce, reduce-scatter or gather them. `finish` uses the last sums.
A schedule decides when messages leave and are awaited; the mathematics is in the pieces.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.program import Timeline

# The arguments that a phase may take.
ARGUMENTS = ("state", "pending", "shards", "rows")


class Phase(NamedTuple):
    """Messages that leave together, made from the sums of the previous phase."""

    name: str
    reads: tuple[str, ...]
    """The arguments that it takes, some of `ARGUMENTS`."""
    run: Callable[..., tuple[Messages, Any]]
    """(*arguments, sums, saved values) → this replica's messages, and the values it saves for the
    next phase. In the first phase the sums and the saved values are None."""
    reductions: tuple[Reduction, ...]
    """The reduction of each message."""


class Pieces(NamedTuple):
    """A step, per replica."""

    phases: tuple[Phase, ...]
    finish: Callable[[Any, Any, Messages, Any, Any], tuple[Any, Any]]
    """(state, shards, sums, saved values, bytes sent per message) → the step's result, equal on all
    replicas, and the shards of the next state."""

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions of all messages, one phase after the other."""
        return tuple(reduction for phase in self.phases for reduction in phase.reductions)


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
    lower: Callable[[StepInputs], jax.stages.Lowered] | None = None
    """The lowered step, if it is one program."""
    goes_on: Callable[[Any], bool] = lambda state: False
    """True if `run` takes a `StateInFlight`: one of its results, with sums to receive."""
    messages: tuple[str, ...] = ()
    """The names of its messages, in order."""
    inside: Callable[[StepInputs], StepOutputs] | None = None
    """`run` as a part of the user's own program, with the rows of all processes; None if the step
    needs the host."""
    timeline: Callable[[], Timeline] | None = None
    """The spans of the last step."""


# (group, pieces, donate) -> runner; donate: True if the step may reuse the state's memory
Schedule: TypeAlias = Callable[[Group, Pieces, bool], Runner]
