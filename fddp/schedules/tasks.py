"""A step as a list of tasks: what is computed, what is sent, and what each of them waits for.

A value has a name, whose first word says what it is: "state/params/w", "message 2", "sum 2". A task reads values and
writes others; the order of the list is the order in which computing is launched and in which messages leave, and it is
equal on all ranks. A list is made without running anything, launched by one of three launchers, simulated on paper, and
held against a compiled program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fddp.hooks import Reduction
from fddp.wording import table

# The first words of names of values that are equal on all replicas; of all others each replica has its own.
EQUAL = frozenset({"state", "sum", "whole", "bytes", "result"})
# The bytes that each message of a list sent, in order; there once the last one is back.
BYTES = "bytes"
# The shards of the state that a step is given.
SHARDS = "shards"
# The shards of the state that a step makes.
NEW = "new"
# What a step returns.
RESULT = "result"
# The first word for a message that came back, by the collective.
BACK = {"all_reduce": "sum", "reduce_scatter": "part", "all_gather": "whole", "tree_reduce": "sum"}


class Compute(NamedTuple):
    """A program of one replica."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[..., Sequence[Any]] = lambda *values: ()
    """(values that it reads) → values that it writes; those that a replica has for itself have a first dim."""
    kind: str = "compute"
    """"compute" (forward and backward) or "update"."""
    reuses: int = 0
    """The number of its first inputs that may be donated: nobody else has them."""


class Communicate(NamedTuple):
    """A message, summed over the replicas, or gathered."""

    name: str
    reads: tuple[str, ...]
    """The message; and, if another message decides whether anybody needs this one, what came back of that."""
    writes: tuple[str, ...]
    """The message as it comes back; the last one of a list also writes the bytes of all."""
    reduction: Reduction = Reduction()
    """Sums it, or gathers it."""
    kind: str = "communication"


Task: TypeAlias = Compute | Communicate


class TaskList(NamedTuple):
    """A step of one replica."""

    tasks: tuple[Task, ...]
    enter: Callable[[Any, Any, Any, Any], dict[str, Any]]
    """(state, pending, shards, rows) → the values that are there at first."""
    leave: Callable[[dict[str, Any]], tuple[Any, Any]]
    """The values that are there at last → the step's result, and the next shards."""

    @property
    def messages(self) -> tuple[Communicate, ...]:
        """The messages, in the order in which they leave."""
        return tuple(task for task in self.tasks if isinstance(task, Communicate))

    @property
    def results(self) -> tuple[str, ...]:
        """The values that a step returns: its result, and the shards of the next state."""
        return tuple(name for task in self.tasks for name in task.writes if first_word(name) in (RESULT, NEW))

    def __str__(self) -> str:
        rows = [(task.kind, task.name, _abridged(task.reads), _abridged(task.writes)) for task in self.tasks]
        return "\n".join(table(rows))


def equal_everywhere(name: str) -> bool:
    """Whether all replicas have the same under this name."""
    return first_word(name) in EQUAL


def first_word(name: str) -> str:
    """The kind of a value: "state" of "state/params/w", "message" of "message 2"."""
    return name.replace("/", " ").split()[0]


def replaces(name: str) -> str:
    """The part of the state whose place a result takes in the next step: "state/step" of "result/0/step"; or ""."""
    return "state/" + name.removeprefix("result/0/") if name.startswith("result/0/") else ""


def communications(rounds: Sequence[Sequence[Reduction]]) -> list[list[Communicate]]:
    """The tasks that send messages, numbered through all rounds: "message k" becomes "sum k"."""
    firsts = np.cumsum([0, *map(len, rounds)]).tolist()

    def tasks(first: int, some: Sequence[Reduction]) -> list[Communicate]:
        backs = [f"{BACK[one.collective]} {k}" for k, one in enumerate(some, first)]

        def task(k: int, one: Reduction) -> Communicate:
            asked = () if one.asks is None else (backs[one.asks.message],)
            told = (BYTES,) if first + k == firsts[-1] - 1 else ()
            return Communicate(one.name, (f"message {first + k}", *asked), (backs[k], *told), one)

        return [task(k, one) for k, one in enumerate(some)]

    return [tasks(first, some) for first, some in zip(firsts, rounds)]


def _abridged(names: Sequence[str], most: int = 3) -> str:
    """A few names of each first word, and how many there are."""
    words: dict[str, list[str]] = {}
    for name in names:
        words.setdefault(first_word(name), []).append(name)
    shown = [", ".join(some[:most]) + f" … ({len(some)})" * (len(some) > most) for some in words.values()]
    return ", ".join(shown) or "–"
