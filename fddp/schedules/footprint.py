"""The memory that a list of tasks needs, task by task, from the sizes of its values.

A value takes memory from the task that writes it to the last task that reads it. While a program
runs, memory holds its inputs, its outputs and XLA's temporary buffers; while a message travels,
the message and its sum. The largest total along the list is the peak of a step.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fddp.schedules.tasks import Task
from fddp.schedules.values import Value


class Moment(NamedTuple):
    """A task, and the bytes in use while it runs."""

    task: str
    nbytes: int


class Footprint(NamedTuple):
    """The bytes of one replica that a list of tasks needs."""

    rests: int
    """Before the first task: the state and the rows."""
    moments: tuple[Moment, ...]
    """While each task runs, in order."""

    @property
    def fullest(self) -> Moment:
        """The task with the most bytes."""
        return max(self.moments, key=lambda moment: moment.nbytes, default=Moment("", self.rests))

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return self.fullest.nbytes


class Planned(NamedTuple):
    """The memory of a program, as XLA has planned it."""

    temporary: int
    """Bytes of temporary buffers."""
    donated: Collection[Value] = ()
    """The inputs that it overwrites."""


def footprint(
    tasks: Sequence[Task],
    sizes: Mapping[Value, int],
    planned: Mapping[str, Planned],
    inputs: Collection[Value],
    results: Collection[Value],
) -> Footprint:
    """Adds up the bytes in use at each task of a list, in launch order.

    `sizes` holds the bytes of values (0 if omitted) and `planned` the programs by task name; a
    message has none. The caller of the step holds `inputs` until it returns, except donated ones.

    Example:
      >>> from fddp.schedules.tasks import Compute
      >>> w, g, new = Value("state", path="w"), Value("gradient"), Value("result", path="w")
      >>> tasks = [Compute("backward", (w,), (g,)), Compute("update", (w, g), (new,))]
      >>> planned = {"backward": Planned(100), "update": Planned(0, donated=[w])}
      >>> footprint(tasks, {w: 8, g: 8, new: 8}, planned, [w], [new]).moments
      (Moment(task='backward', nbytes=116), Moment(task='update', nbytes=16))
    """
    last_reader = {value: at for at, task in enumerate(tasks) for value in task.reads}
    live = set(inputs)
    moments = list[Moment]()
    for at, task in enumerate(tasks):
        program = planned.get(task.name, Planned(0))
        live.difference_update(program.donated)
        live.update(task.writes)
        moments.append(Moment(task.name, program.temporary + _total(live, sizes)))
        for value in (*task.reads, *task.writes):
            if last_reader.get(value, at) <= at and value not in inputs and value not in results:
                live.discard(value)
    return Footprint(_total(inputs, sizes), tuple(moments))


def _total(values: Collection[Value], sizes: Mapping[Value, int]) -> int:
    return sum(sizes.get(value, 0) for value in values)
