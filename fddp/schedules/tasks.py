"""A step as a list of tasks: what is computed, what is sent, and what each of them waits for.

A value is known by its kind, and by which of its kind it is: "state/params/w", "message 2", "sum 2". A task reads
values and writes others; the order of the list is the order in which computing is launched and in which messages leave,
and it is equal on all ranks. A list is made without running anything, launched by one of two launchers, simulated on
paper, and held against a compiled program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fddp.hooks import Reduction
from fddp.wording import preformatted, table

# The parts of the state that are equal on all replicas, as a step is given them.
STATE = "state"
# The shards of the state that a step is given.
SHARDS = "shards"
# The shards of the state that a step makes.
NEW = "new"
# What a step returns: the next state first, and behind it what it tells.
RESULT = "result"
# What a replica sends.
MESSAGE = "message"
# What a stage of an update hands on to the next one, equal on all replicas.
HANDED = "handed on"
# What an update has written slice by slice so far, each replica's own.
WRITTEN = "written"
# Where the slices of some rounds of a loop begin.
BEGIN = "round"
# The kinds of values that are equal on all replicas; of all others each replica has its own.
EQUAL = frozenset({STATE, RESULT, HANDED, BEGIN, "sum", "whole", "bytes"})
# The kind of a message that came back, by the collective.
BACK = {"all_reduce": "sum", "reduce_scatter": "part", "all_gather": "whole", "tree_reduce": "sum"}


class Value(str):
    """A value of a list: a record that reads as its name, and is known by it.

    Example:
      >>> Value("message", 2), Value("state", path="params/w").path
      ('message 2', 'params/w')
    """

    kind: str
    """The thing that it is: "state", "message", "sum", "stage" …"""
    number: int | None
    """The number of the message, or of the stage that made it."""
    path: str
    """Its place in a tree."""

    def __new__(cls, kind: str, number: int | None = None, path: str = "") -> "Value":
        made = super().__new__(cls, f"{kind}{'' if number is None else f' {number}'}{'/' if path else ''}{path}")
        made.kind = kind
        made.number = number
        made.path = path
        return made

    @property
    def equal_everywhere(self) -> bool:
        """Whether all replicas have the same."""
        return self.kind in EQUAL

    @property
    def replaces(self) -> "Value | None":
        """The part of the state whose place this result takes in the next step, if it takes one."""
        if self.kind == NEW:
            return Value(SHARDS, path=self.path)
        head, _, path = self.path.partition("/")
        return Value(STATE, path=path) if self.kind == RESULT and head == "0" else None


# The bytes that each message of a list sent, in order; there once the last one is back.
BYTES = Value("bytes")


class Compute(NamedTuple):
    """A program of one replica."""

    name: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    run: Callable[..., Sequence[Any]] = lambda *values: ()
    """(values that it reads) → values that it writes; those that a replica has for itself have a first dim."""
    kind: str = "compute"
    """"compute" (forward and backward), "update", or "communication": a collective of the loss alone."""
    reuses: int = 0
    """The number of its first inputs that may be donated: nobody else has them."""
    speaks: bool = False
    """Whether it holds collectives of the loss: such tasks are done one after the other, in one order on all ranks."""


class Communicate(NamedTuple):
    """A message, summed over the replicas, or gathered."""

    name: str
    reads: tuple[Value, ...]
    """The message; and, if another message decides whether anybody needs this one, what came back of that."""
    writes: tuple[Value, ...]
    """The message as it comes back; the last one of a list also writes the bytes of all."""
    reduction: Reduction = Reduction()
    """Sums it, or gathers it."""
    kind: str = "communication"


Task: TypeAlias = Compute | Communicate


class TaskList(NamedTuple):
    """A step of one replica."""

    tasks: tuple[Task, ...]
    enter: Callable[[Any, Any, Any, Any], dict[Value, Any]]
    """(state, pending, shards, rows) → the values that are there at first."""
    leave: Callable[[Mapping[Value, Any]], tuple[Any, Any]]
    """The values that are there at last → the step's result, and the next shards."""

    @property
    def messages(self) -> tuple[Communicate, ...]:
        """The messages, in the order in which they leave."""
        return tuple(task for task in self.tasks if isinstance(task, Communicate))

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that a step returns: its result, and the shards of the next state."""
        return tuple(value for task in self.tasks for value in task.writes if value.kind in (RESULT, NEW))

    def __str__(self) -> str:
        rows = [(task.kind, task.name, _abridged(task.reads), _abridged(task.writes)) for task in self.tasks]
        return "\n".join(table(rows))

    _repr_html_ = preformatted


def communications(rounds: Sequence[Sequence[Reduction]]) -> list[list[Communicate]]:
    """The tasks that send messages, numbered through all rounds: "message k" becomes "sum k"."""
    firsts = np.cumsum([0, *map(len, rounds)]).tolist()

    def tasks(first: int, some: Sequence[Reduction]) -> list[Communicate]:
        backs = [Value("part" if one.among_some else BACK[one.collective], k) for k, one in enumerate(some, first)]

        def task(k: int, one: Reduction) -> Communicate:
            asked = () if one.asks is None else (backs[one.asks.message],)
            told = (BYTES,) if first + k == firsts[-1] - 1 else ()
            return Communicate(one.name, (Value(MESSAGE, first + k), *asked), (backs[k], *told), one)

        return [task(k, one) for k, one in enumerate(some)]

    return [tasks(first, some) for first, some in zip(firsts, rounds)]


def _abridged(values: Sequence[Value], most: int = 3) -> str:
    """A few values of each kind, and how many there are."""
    kinds: dict[str, list[Value]] = {}
    for value in values:
        kinds.setdefault(value.kind, []).append(value)
    shown = [", ".join(some[:most]) + f" … ({len(some)})" * (len(some) > most) for some in kinds.values()]
    return ", ".join(shown) or "–"
