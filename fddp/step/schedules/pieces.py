"""The pieces of a step, from which a schedule makes a program.

A step is a function of one replica. It passes messages to `send`, from its gradients or from
earlier sums, and receives their sums. A schedule decides when messages leave and are awaited; the
mathematics is in the function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import Array, UInt32

from fddp.buckets import Messages
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.step.schedules.timeline import Timeline

# This replica's next messages → their sums, and the bytes that it sent for each
Send: TypeAlias = Callable[[Messages], tuple[Messages, UInt32[Array, " messages"]]]


class Pieces(NamedTuple):
    """A step, per replica."""

    run: Callable[[Any, Any, Any, Any, Send], tuple[Any, Any]]
    """(state, pending sums, shards, rows, send) → the step's result, equal on all replicas, and the
    shards of the next state."""
    reductions: tuple[Reduction, ...] = ()
    """The reduction of each message, in the order in which `run` sends them."""


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
