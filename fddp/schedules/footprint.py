"""The memory that a list of tasks needs, task by task: a function of the tasks and of the sizes of their values.

A value takes memory from the task that writes it to the last task that reads it. While a program runs there are the
values that it reads, those that it writes, and what XLA plans for it in between. While a message is on its way there
are the message and its sum. The largest of these sums along the list is the peak of a step.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fddp.schedules.tasks import Task, Value


class Moment(NamedTuple):
    """A task, and the bytes that there are while it is done."""

    task: str
    nbytes: int


class Footprint(NamedTuple):
    """The bytes of one replica that a list of tasks needs."""

    rests: int
    """Those that are there before the first task: the state and the rows."""
    moments: tuple[Moment, ...]
    """Those that are there while each task is done, in order."""

    @property
    def fullest(self) -> Moment:
        """The task with the most."""
        return max(self.moments, key=lambda moment: moment.nbytes, default=Moment("", self.rests))

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return self.fullest.nbytes


class Planned(NamedTuple):
    """The memory of a program, as XLA has planned it."""

    temporary: int
    """Bytes beside the values that it reads and writes."""
    donated: Collection[Value] = ()
    """The values that it reads and writes over."""


def footprint(
    tasks: Sequence[Task],
    sizes: Mapping[Value, int],
    planned: Mapping[str, Planned],
    given: Collection[Value],
    kept: Collection[Value],
) -> Footprint:
    """Walks a list, and adds up what is there at each task.

    Args:
      tasks: in the order in which they are launched.
      sizes: the bytes of the values; those that are left out take none.
      planned: the programs, by the names of their tasks; a message has none.
      given: the values that are there at first. Whoever calls the step holds them until it returns, but for those that
        are donated.
      kept: the values that are wanted in the end.

    Returns:
      The bytes at each task.

    Example:
      >>> from fddp.schedules.tasks import Compute
      >>> w, g, new = Value("state", path="w"), Value("gradient"), Value("result", path="w")
      >>> tasks = [Compute("backward", (w,), (g,)), Compute("update", (w, g), (new,))]
      >>> planned = {"backward": Planned(100), "update": Planned(0, donated=[w])}
      >>> footprint(tasks, {w: 8, g: 8, new: 8}, planned, [w], [new]).moments
      (Moment(task='backward', nbytes=116), Moment(task='update', nbytes=16))
    """
    last = {value: at for at, task in enumerate(tasks) for value in task.reads}
    there = set(given)
    moments = list[Moment]()
    for at, task in enumerate(tasks):
        program = planned.get(task.name, Planned(0))
        there.difference_update(program.donated)
        there.update(task.writes)
        moments.append(Moment(task.name, program.temporary + _total(there, sizes)))
        over = [value for value in (*task.reads, *task.writes) if last.get(value, at) <= at]
        there.difference_update(value for value in over if value not in given and value not in kept)
    return Footprint(_total(given, sizes), tuple(moments))


def _total(values: Collection[Value], sizes: Mapping[Value, int]) -> int:
    return sum(sizes.get(value, 0) for value in values)
