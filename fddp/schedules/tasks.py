"""A step as a list of tasks: computations, messages, and the values that each task waits for.

A value is identified by its kind and by a number or a path: "state/params/w", "message 2",
"sum 2". A task reads values and writes others. The order of the list is the order in which
computations are launched and messages leave, equal on all ranks. A list is made without running
anything; it can be launched, simulated, and compared with a compiled program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fddp.hooks import Reduction
from fddp.schedules.values import NEW, RESULT, Value
from fddp.wording import preformatted, table


class Compute(NamedTuple):
    """A program of one replica."""

    name: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    run: Callable[..., Sequence[Any]] = lambda *values: ()
    """(inputs) → outputs; a value that each replica has for itself has a leading replica dim."""
    kind: str = "compute"
    """"compute" (forward and backward), "update", or "communication": a collective of the loss."""
    reuses: int = 0
    """The number of its first inputs that may be donated, because no other task reads them."""
    speaks: bool = False
    """True if it holds collectives of the loss: such tasks run in one order on all ranks."""


class Communicate(NamedTuple):
    """A message that is reduced or gathered over the replicas."""

    name: str
    reads: tuple[Value, ...]
    """The message; then, if another message decides whether it is needed, the sum of that one."""
    writes: tuple[Value, ...]
    """The sum; the last message of a list also writes the bytes of all."""
    reduction: Reduction = Reduction()
    """Sums it, or gathers it."""
    kind: str = "communication"


Task: TypeAlias = Compute | Communicate


class TaskList(NamedTuple):
    """A step of one replica."""

    tasks: tuple[Task, ...]
    enter: Callable[[Any, Any, Any, Any], dict[Value, Any]]
    """(state, pending, shards, rows) → the initial values."""
    leave: Callable[[Mapping[Value, Any]], tuple[Any, Any]]
    """The final values → the step's result, and the next shards."""

    @property
    def messages(self) -> tuple[Communicate, ...]:
        """The messages, in the order in which they leave."""
        return tuple(task for task in self.tasks if isinstance(task, Communicate))

    @property
    def computations(self) -> tuple[Compute, ...]:
        """The programs, in the order in which they are launched."""
        return tuple(task for task in self.tasks if isinstance(task, Compute))

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that a step returns: its result, and the shards of the next state."""
        return tuple(v for task in self.tasks for v in task.writes if v.kind in (RESULT, NEW))

    def __str__(self) -> str:
        rows = [
            (task.kind, task.name, _abridged(task.reads), _abridged(task.writes))
            for task in self.tasks
        ]
        return "\n".join(table(rows))

    _repr_html_ = preformatted


def _abridged(values: Sequence[Value], most: int = 3) -> str:
    """The first values of each kind, and their number."""
    kinds: dict[str, list[Value]] = {}
    for value in values:
        kinds.setdefault(value.kind, []).append(value)
    shown = list[str]()
    for group in kinds.values():
        shown.append(", ".join(group[:most]))
        if len(group) > most:
            shown[-1] += f" … ({len(group)})"
    return ", ".join(shown) or "–"
