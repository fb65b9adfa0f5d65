"""Simulates steps that overlap: the time of a step amid many others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fddp.schedules import simulate
from fddp.schedules.queues import by_kind
from fddp.schedules.tasks import Task
from fddp.schedules.values import NEW, RESULT, Value

STEPS = 4  # simulated: the last step takes as long as all that would follow


def steady_seconds(
    tasks: Sequence[Task],
    seconds: Mapping[str, float],
    is_late: Callable[[Value], Any] = lambda value: False,
) -> float:
    """Simulates several steps in a row, and returns the seconds between two ends: see `simulate`.

    Args:
      tasks: of a step that overlaps the next one.
      seconds: of each task, by its name.
      is_late: (name of a result) → True if the step returns before it is ready.
    """
    written = [name for task in tasks for name in task.writes]
    results = [name for name in written if name.kind in (NEW, RESULT)]
    # The name by which a step reads a value → the name by which the step before it has written that
    # value.
    before = {name.replaces: name for name in results if is_late(name)}
    several = list[Task]()
    seconds_of = dict[str, float]()
    end_values = list[Value]()
    for step in range(STEPS):
        for place, task in enumerate(tasks):
            reads = [
                _at(step - 1, before[name]) if name in before else _at(step, name)
                for name in task.reads
            ]
            # A step begins when the one before it has returned, with all results that are not late.
            reads += (
                [_at(step - 1, name) for name in results if not is_late(name)]
                if place == 0 and step
                else []
            )
            writes = tuple(_at(step, name) for name in task.writes)
            several.append(
                task._replace(name=_at(step, task.name), reads=tuple(reads), writes=writes)
            )
            seconds_of[several[-1].name] = seconds.get(task.name, 0.0)
        end_values.append(
            _at(step, [task.name for task in tasks if not set(results).isdisjoint(task.writes)][-1])
        )
    end_of = {span.name: span.end for span in simulate(several, seconds_of, queue=by_kind).spans}
    return end_of[end_values[-1]] - end_of[end_values[-2]]


def _at(step: int, name: str) -> Value:
    return Value(f"{name} @{step}")
