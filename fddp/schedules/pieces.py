"""Three pieces of a step, and what a schedule makes of them.

`local` makes a replica's gradients and packs them, a reduction makes each wire's sum over replicas, `finish` uses them.
A schedule says only which of these share an XLA program and what waits for what; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fddp.buckets import Wires
from fddp.comm import Group
from fddp.hooks import Memory, Reduction
from fddp.schedules.timeline import Timeline


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Wires, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]
    """How each message is summed."""
    finish: Callable[[Any, Wires, Any, Any], Any]
    """(state, what came back, what was kept, bytes sent per wire) → the step's result, equal on all replicas."""


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Memory, Any], tuple[Any, Memory]]
    """(state, pending, memory, rows) → the step's result, and what to remember; state is equal everywhere, pending and
    memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """When the last step computed and communicated, where it is several programs."""


# (group, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule = Callable[[Group, Pieces, bool], Runner]
