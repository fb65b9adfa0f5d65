"""A step as a list of tasks: computations, messages, and the values that each task waits for.

A value is identified by its kind and by a number or a path: "state/params/w", "message 2",
"sum 2". A task reads values and writes others. The order of the list is the order in which
computations are launched and messages leave, equal on all ranks. A list is made without running
anything; it can be launched, simulated, and compared with a compiled program.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import PyTree

from fddp.hooks import Reduction
from fddp.wording import leaf_name, preformatted, table

# The replicated arrays of the state that a step takes.
STATE = "state"
# The shards of the state that a step takes.
SHARDS = "shards"
# The shards of the next state.
NEW = "new"
# The result of a step: the next state, then its report.
RESULT = "result"
# A message of one replica.
MESSAGE = "message"
# A replicated value that a stage of an update passes to the next stage.
HANDED = "handed on"
# The slices that an update has written so far, each replica's own.
WRITTEN = "written"
# The offset of the first slice of some rounds of a loop.
BEGIN = "round"
# The kinds of values that are equal on all replicas; of other kinds each replica has its own value.
EQUAL = frozenset({STATE, RESULT, HANDED, BEGIN, "sum", "whole", "bytes"})
# The kind of a received message, by the collective.
BACK = {"all_reduce": "sum", "reduce_scatter": "part", "all_gather": "whole", "tree_reduce": "sum"}


class Value(str):
    """A value of a list: a record that prints as its name, and is identified by it.

    Example:
      >>> Value("message", 2), Value("state", path="params/w").path
      ('message 2', 'params/w')
    """

    kind: str
    """Its kind: "state", "message", "sum", "stage" …"""
    number: int | None
    """The number of the message, or of the stage that computes it."""
    path: str
    """Its path in a tree."""

    def __new__(cls, kind: str, number: int | None = None, path: str = "") -> "Value":
        text = kind
        if number is not None:
            text += f" {number}"
        if path:
            text += f"/{path}"
        value = super().__new__(cls, text)
        value.kind = kind
        value.number = number
        value.path = path
        return value

    @property
    def equal_everywhere(self) -> bool:
        """True if all replicas have the same value."""
        return self.kind in EQUAL

    @property
    def replaces(self) -> "Value | None":
        """The array of the state that this result replaces in the next step, if any."""
        if self.kind == NEW:
            return Value(SHARDS, path=self.path)
        head, _, path = self.path.partition("/")
        if self.kind == RESULT and head == "0":
            return Value(STATE, path=path)
        return None


# The bytes sent for each message of a list, in order; known once the last message has arrived.
BYTES = Value("bytes")


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


def names_of(kind: str, tree: PyTree) -> list[Value]:
    """A value of a kind for each leaf of a tree, by its path."""
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    counts = Counter(paths)
    values = list[Value]()
    for at, path in enumerate(paths):
        if counts[path] > 1:  # two paths may read alike: {"a/b": …} and {"a": {"b": …}}
            path += f" {at}"
        values.append(Value(kind, path=path))
    return values


def communications(rounds: Sequence[Sequence[Reduction]]) -> list[list[Communicate]]:
    """Makes the tasks of messages, numbered through all rounds: "message k" becomes "sum k"."""
    count = sum(map(len, rounds))
    numbers = itertools.count()
    tasks = list[list[Communicate]]()
    for reductions in rounds:
        sends = list[Communicate]()
        for reduction, number in zip(reductions, numbers):
            reads = [Value(MESSAGE, number)]
            if reduction.asks is not None:
                reads.append(sends[reduction.asks.message].writes[0])
            writes = [Value(_kind_received(reduction), number)]
            if number == count - 1:
                writes.append(BYTES)
            sends.append(Communicate(reduction.name, tuple(reads), tuple(writes), reduction))
        tasks.append(sends)
    return tasks


def inputs_of(sends: Sequence[Communicate]) -> tuple[Value, ...]:
    """The messages that tasks send."""
    return tuple(task.reads[0] for task in sends)


def sums_of(sends: Sequence[Communicate]) -> tuple[Value, ...]:
    """The results of messages."""
    return tuple(task.writes[0] for task in sends)


def _kind_received(reduction: Reduction) -> str:
    if reduction.among_some:
        return "part"
    return BACK[reduction.collective]


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
