"""How the tasks of queues are done: with which programs, on which communicator, and how by the thread that has them."""

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
    """The same replicas on a communicator of their own, for what leaves between two steps.

    That is no message of a step that may be tried again.

    Args:
      group: the replicas.

    Returns:
      The group, and whether its messages may be under way beside others: not where there is no second communicator, and
      not on GPUs, each of which has its queue for what several threads launch, and they launch in any order.
    """
    own = group.clone(2)
    lane = replace(group, transport=own[-1], recovery=Recovery(lambda place, seconds: False))
    return lane, len(own) > 1 and group.backend != "nccl"


def compiled_apart(
    placement: Placement, listed: TaskList, values: Mapping[str, Any], donate: bool, says: Compiling
) -> Programs:
    """Stages may use no memory that an update on another thread still reads, nor the other way round."""
    return compiled(placement, listed, values, donate, says, kept_last(listed))


def computing(programs: Programs, journal: Journal, log: Log) -> tuple[Do, Callable[[], None]]:
    """Does a stage while the one before it runs, so that the core never waits for Python; and waits for both.

    Args:
      programs: by the names of tasks.
      journal: of this process.
      log: where spans are noted.

    Returns:
      What does a task, and what waits until nothing is launched.
    """
    launched, clock = deque[tuple[Task, Sequence[Any], float]](), perf_counter()

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
    """Does an update, and waits for it.

    Args:
      programs: by the names of tasks.
      log: where spans are noted.
      after: what has to be over before the first.

    Returns:
      What does a task.
    """

    def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
        if after:
            after.result()
        # A collective of MPI takes a token along, which is new in each thread.
        with log.under_way(task), asked_for():
            return wait_for(task.name, programs[task.name](*read))

    return do
