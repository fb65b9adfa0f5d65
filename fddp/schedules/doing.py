"""Does the tasks of queues: functions for stages and for updates, their programs, and a second communicator."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import Any

from fddp.comm import Group, Journal, Placement, Recovery
from fddp.jax_internals import asked_for
from fddp.schedules.ahead import kept_last
from fddp.schedules.compiling import Compiling
from fddp.schedules.log import Log
from fddp.schedules.programs import Programs, compiled
from fddp.schedules.queues import Do
from fddp.schedules.shown import wait_for
from fddp.schedules.tasks import Task, TaskList
from fddp.schedules.timeline import Span


def own_lane(group: Group) -> tuple[Group, bool]:
    """Gives the same replicas another communicator, for messages that leave between two steps.

    Such messages belong to no step that may be tried again.

    Args:
      group: the replicas.

    Returns:
      The group, and whether its messages may be under way beside others. They may not where there is no second
      communicator. Nor may they on GPUs: each has one queue for what several threads launch, in any order.
    """
    own = group.clone(2)
    lane = replace(group, transport=own[-1], recovery=Recovery(lambda place, seconds: False))
    return lane, len(own) > 1 and group.backend != "nccl"


def compiled_apart(
    placement: Placement, listed: TaskList, values: Mapping[str, Any], donate: bool, says: Compiling
) -> Programs:
    """Compiles stages that reuse no memory which an update on another thread still reads, and updates likewise."""
    return compiled(placement, listed, values, donate, says, kept_last(listed))


def computing(programs: Programs, journal: Journal, log: Log) -> tuple[Do, Callable[[], None]]:
    """Makes a function that launches a stage while the one before it runs, so that the core never waits for Python.

    Args:
      programs: by the names of tasks.
      journal: of this process.
      log: where spans are noted.

    Returns:
      A function that does a task, and one that waits for all that were launched.
    """
    launched = deque[tuple[Task, Sequence[Any], float]]()
    clock = perf_counter()

    def wait_until(most: int) -> None:
        nonlocal clock
        while len(launched) > most:
            task, made, since = launched.popleft()
            wait_for(task.name, made)
            log.add(Span(task.kind, task.name, max(since, clock), clock := perf_counter()))

    def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
        since = perf_counter()
        journal.say(task.name)
        made = programs[task.name](*read)
        launched.append((task, made, since))
        wait_until(1)
        return made

    return do, lambda: wait_until(0)


def updating(programs: Programs, log: Log, after: Future[Any] | None = None) -> Do:
    """Makes a function that does an update and waits for it.

    Args:
      programs: by the names of tasks.
      log: where spans are noted.
      after: has to be over before the first update.

    Returns:
      The function that does a task.
    """

    def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
        if after:
            after.result()
        # A collective of MPI takes a token along, which is new in each thread.
        with log.under_way(task), asked_for():
            return wait_for(task.name, programs[task.name](*read))

    return do
