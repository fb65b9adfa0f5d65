"""Runs tasks in several queues, each in its order on a thread of its own; futures carry values between queues."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import jax

from fddp.comm import Group
from fddp.schedules.tasks import BYTES, STATE, Communicate, Compute, Task, TaskList, Value

HERE = "here"  # the queue of the thread that calls the step
SPEAKING = "collectives"  # the queue of a loss's collectives, where these have a communicator of their own

# Names the queue of a task: tasks of one queue are done one after the other, different queues side by side.
QueueOf: TypeAlias = Callable[[Task], str]
# Does a task: (task, values that it reads) → values that it writes.
Do: TypeAlias = Callable[[Task, Sequence[Any]], Sequence[Any]]


def by_kind(task: Task) -> str:
    """Gives a queue each to computing, on the calling thread, to all that is sent and to updates."""
    return "communication" if speaks(task) else HERE if task.kind == "compute" else task.kind


def speaks(task: Task) -> bool:
    """Whether a task holds collectives of the loss."""
    return isinstance(task, Compute) and task.speaks


def heard(group: Group, queue_of: QueueOf) -> QueueOf:
    """Gives the collectives of a loss a queue of their own, where no message can meet them.

    Args:
      group: the replicas. On a mesh messages and collectives share a communicator, and leave in one order.
      queue_of: names a task's queue, on a mesh.

    Returns:
      What names it there and elsewhere.
    """
    return queue_of if group.placement.on_mesh else lambda task: SPEAKING if speaks(task) else queue_of(task)


class Promise(Future[Any]):
    """An array that is still being made, of a known form."""

    def __init__(self, form: jax.ShapeDtypeStruct) -> None:
        super().__init__()
        self.form = form
        self.shape = form.shape
        self.dtype = form.dtype

    def there(self) -> list[Any]:
        """The arrays of it that are there."""
        return [self.result()] if self.done() else []


def forms_promised(tree: Any) -> Any:
    """Replaces each promise in a tree by its form."""
    return jax.tree.map(lambda x: x.form if isinstance(x, Promise) else x, tree)


def awaited(x: Any) -> Any:
    """Waits for a value, if it is a future of one."""
    return x.result() if isinstance(x, Future) else x


class Routes(NamedTuple):
    """Tasks by their queues, and the ways of their values; found once for each list."""

    queues: dict[str, tuple[Task, ...]]
    """The tasks of each queue, in order."""
    given: tuple[Value, ...]
    """The values that tasks read and none writes."""
    kept: tuple[Value, ...]
    """The values that are wanted in the end."""
    crossing: tuple[Value, ...]
    """The values that one queue writes and another one waits for."""
    readers: Mapping[Value, int]
    """The number of tasks that read a value; whoever wants it in the end counts as one more."""

    @property
    def speaking(self) -> tuple[str, ...]:
        """The queues of messages."""
        return tuple(
            queue for queue, tasks in self.queues.items() if any(isinstance(task, Communicate) for task in tasks)
        )

    def makes(self, queue: str, values: Collection[Value]) -> bool:
        """Whether a queue writes one of these values."""
        return any(value in values for task in self.queues[queue] for value in task.writes)


@dataclass(frozen=True)
class Arranged:
    """A list of tasks, arranged for the launcher."""

    routes: tuple[Routes, ...]
    """The list in each order, or in each part, that may be launched."""
    freed: Mapping[str, tuple[Value, ...]]
    """The values whose memory a task may have, for each task by name."""

    @cached_property
    def gives(self) -> tuple[Value, ...]:
        """The arrays of the state among these."""
        return tuple({value for values in self.freed.values() for value in values if value.kind == STATE})


# (a list of tasks) → the same, arranged
Arrange: TypeAlias = Callable[[TaskList], Arranged]


def as_listed(queues_of: Callable[[TaskList], QueueOf]) -> Arrange:
    """Makes a function that arranges a list as it is.

    Args:
      queues_of: (list) → what names a task's queue.

    Returns:
      The function.
    """

    def arrange(listed: TaskList) -> Arranged:
        queue_of = queues_of(listed)
        return Arranged((routed(listed.tasks, queue_of, listed.results),), freed([listed.tasks], queue_of))

    return arrange


def routed(tasks: Sequence[Task], queue_of: QueueOf, kept: Sequence[Value]) -> Routes:
    """Deals tasks out to queues.

    Args:
      tasks: in order.
      queue_of: names a task's queue.
      kept: the values that the thread which calls the step wants in the end.

    Returns:
      The queues, and the ways of values between them.
    """
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(queue_of(task), []).append(task)
    wanted = _readers(tasks, queue_of)
    for name in kept:
        wanted.setdefault(name, set()).add(HERE)
    written = {name: queue_of(task) for task in tasks for name in task.writes}
    # The queue that tells the bytes of all messages starts last: it waits for the other queues of messages.
    order = sorted(queues, key=lambda queue: any(BYTES in task.writes for task in queues[queue]))
    return Routes(
        queues={queue: tuple(queues[queue]) for queue in order},
        given=tuple(name for name in wanted if name not in written),
        kept=tuple(kept),
        crossing=tuple(name for name, queue in written.items() if wanted.get(name, {queue}) != {queue}),
        readers=Counter([*kept, *(name for task in tasks for name in task.reads)]),
    )


def freed(orders: Sequence[Sequence[Task]], queue_of: QueueOf) -> dict[str, tuple[Value, ...]]:
    """Finds the values whose memory a task may have.

    Args:
      orders: the same tasks, in each order in which they may run.
      queue_of: names a task's queue.

    Returns:
      The values that a task is the last to read in each order, for each task by name. A value that another queue reads
      as well is left out: that queue may lag.
    """
    queues = _readers(orders[0], queue_of)
    last = [{name: task.name for task in tasks for name in task.reads} for tasks in orders]

    def alone(task: Task, name: Value) -> bool:
        return len(queues[name]) == 1 and all(of[name] == task.name for of in last)

    return {task.name: tuple(name for name in task.reads if alone(task, name)) for task in orders[0]}


def _readers(tasks: Sequence[Task], queue_of: QueueOf) -> dict[Value, set[str]]:
    """Finds the queues that read each value."""
    queues: dict[Value, set[str]] = {}
    for task in tasks:
        for name in task.reads:
            queues.setdefault(name, set()).add(queue_of(task))
    return queues


class Queues:
    """Tasks that wait for each other across threads."""

    def __init__(self, routes: Routes, values: Mapping[Value, Any], futures: Mapping[Value, Future[Any]]) -> None:
        """Makes a future for each value that crosses from one queue to another.

        Args:
          routes: the tasks.
          values: those that are there at first, or futures of them. All values but those that are kept are dropped as
            soon as their last reader has them, so that their memory can be used again.
          futures: those that somebody waits for already, by the values' names.
        """
        self._routes = routes
        self._readers = dict(routes.readers)
        self._lock = Lock()
        given = {name: values[name] for name in routes.given if name in values}
        self._there: dict[Value, Any] = {**given, **{name: futures.get(name) or Future() for name in routes.crossing}}

    def kept(self) -> dict[Value, Any]:
        """The values that are wanted in the end, or futures of them, once the calling thread's queue is done."""
        return {name: self._there[name] for name in self._routes.kept}

    def work(self, queue: str, do: Do, idle: Callable[[], None] = lambda: None) -> None:
        """Does the tasks of a queue. An error also reaches all who wait for the rest of it, so that nobody hangs.

        Args:
          queue: its name.
          do: does a task.
          idle: is called before a task has to be waited for, and at the end.
        """
        tasks = self._routes.queues.get(queue, ())
        done = 0
        try:
            for task in tasks:
                self._keep(task, do(task, self._take(task, idle)))
                done += 1
            idle()
        except BaseException as error:
            for name in (name for task in tasks[done:] for name in task.writes):
                promise = self._there.get(name)
                if isinstance(promise, Future) and not promise.done():
                    promise.set_exception(error)
            raise

    def _take(self, task: Task, idle: Callable[[], None]) -> list[Any]:
        there = [self._there[name] for name in task.reads]
        if not all(x.done() for x in there if isinstance(x, Future)):
            idle()
        read = list(map(awaited, there))
        with self._lock:
            for name in task.reads:
                self._readers[name] -= 1
                if not self._readers[name]:
                    self._there.pop(name, None)
        return read

    def _keep(self, task: Task, made: Sequence[Any]) -> None:
        for name, value in zip(task.writes, made, strict=True):
            promise = self._there.get(name)
            if isinstance(promise, Future):
                promise.set_result(value)
            elif self._readers.get(name):
                self._there[name] = value
