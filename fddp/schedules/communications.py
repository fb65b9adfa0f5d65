"""The tasks of messages, numbered through a step."""

import itertools
from collections.abc import Sequence

from fddp.hooks import Reduction
from fddp.schedules.tasks import Communicate
from fddp.schedules.values import BYTES, MESSAGE, Value

# The kind of a received message, by the collective.
BACK = {"all_reduce": "sum", "reduce_scatter": "part", "all_gather": "whole"}


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
            writes = [Value(BACK[reduction.collective.kind], number)]
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
