"""How the tasks of a queue are done by the thread that has it: stages, one ahead of the one that runs, and updates."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import jax

from fddp.comm import Journal
from fddp.jax_internals import asked_for
from fddp.schedules.log import Log
from fddp.schedules.programs import Programs
from fddp.schedules.queues import Do
from fddp.schedules.tasks import Task
from fddp.schedules.timeline import Span


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

    def wait_for(most: int) -> None:
        nonlocal clock
        while len(launched) > most:
            task, made, since = launched.popleft()
            jax.block_until_ready(made)
            log.add(Span(task.kind, task.name, max(since, clock), clock := perf_counter()))

    def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
        since = perf_counter()
        journal.say(task.name)
        made = programs[task.name](*read)
        launched.append((task, made, since))
        wait_for(1)
        return made

    return do, lambda: wait_for(0)


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
            return jax.block_until_ready(programs[task.name](*read))

    return do
