"""Runs tasks in several queues, each in order on its own thread, with futures between them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.jax_internals import Promise, awaited
from fddp.schedules.tasks import Communicate, Compute, Task, TaskList
from fddp.schedules.values import BYTES, Value

HERE = "here"  # the queue of the thread that calls the step
# The queue of a loss's collectives, if these have a communicator of their own.
SPEAKING = "collectives"

# Names the queue of a task. Tasks of one queue run in order, different queues run concurrently.
QueueOf: TypeAlias = Callable[[Task], str]
# Runs a task: (task, inputs) → outputs.
Do: TypeAlias = Callable[[Task, Sequence[Any]], Sequence[Any]]


def by_kind(task: Task) -> str:
    """Names one queue each for computations, on the calling thread, for messages and updates."""
    if speaks(task):
        return "communication"
    return HERE if task.kind == "compute" else task.kind


def speaks(task: Task) -> bool:
    """True if a task holds collectives of the loss."""
    return isinstance(task, Compute) and task.speaks


def heard(group: Group, queue_of: QueueOf) -> QueueOf:
    """Moves the collectives of a loss to a queue of their own, where they cannot mix with messages.

    On a mesh they share a communicator with the messages, and leave in one order with them.
    """
    if group.placement.on_mesh:
        return queue_of
    return lambda task: SPEAKING if speaks(task) else queue_of(task)


def forms_promised(tree: PyTree) -> Any:
    """Replaces each promise in a tree by its shape."""
    return jax.tree.map(lambda x: x.form if isinstance(x, Promise) else x, tree)


class Routed(NamedTuple):
    """A task, and those of its values that need more than a look-up."""

    task: Task
    last: tuple[Value, ...]
    """The values without a later reader that only its queue reads."""
    shared: tuple[Value, ...]
    """The values that it reads, as tasks of other queues do."""
    crossing: tuple[Value, ...]
    """The values that it writes for other queues."""
    unread: tuple[Value, ...]
    """The values that it writes for no reader."""


class Routes(NamedTuple):
    """Tasks by queue, and the routes of their values; computed once per list."""

    queues: dict[str, tuple[Routed, ...]]
    """The tasks of each queue, in order."""
    inputs: tuple[Value, ...]
    """The values that tasks read and none writes."""
    results: tuple[Value, ...]
    """The values that the caller needs at the end."""
    crossing: frozenset[Value]
    """The values that one queue writes and another one reads."""
    readers: Mapping[Value, int]
    """The number of tasks that read a value of several queues, plus one if the caller needs it."""

    @property
    def freed(self) -> dict[str, tuple[Value, ...]]:
        """Task name → the values whose memory it may reuse: no other task reads them later.

        A value that another queue reads as well is not among them: that queue may lag.
        """
        return {entry.task.name: entry.last for tasks in self.queues.values() for entry in tasks}

    @property
    def speaking(self) -> tuple[str, ...]:
        """The queues that hold messages."""
        return tuple(
            queue
            for queue, tasks in self.queues.items()
            if any(isinstance(entry.task, Communicate) for entry in tasks)
        )

    def makes(self, queue: str, values: Collection[Value]) -> bool:
        """True if a queue writes one of these values."""
        return any(value in values for entry in self.queues[queue] for value in entry.task.writes)


# (a list of tasks) → the same, by queue
Arrange: TypeAlias = Callable[[TaskList], Routes]


def arranging(
    queues_of: Callable[[TaskList], QueueOf],
    order: Callable[[TaskList], Sequence[Task]] = lambda listed: listed.tasks,
) -> Arrange:
    """Makes a function that arranges a list; `order` returns its tasks in launch order."""
    return lambda listed: routed(order(listed), queues_of(listed), listed.results)


def routed(tasks: Sequence[Task], queue_of: QueueOf, results: Sequence[Value]) -> Routes:
    """Assigns tasks to queues; the calling thread needs `results` at the end."""
    reading: dict[Value, set[str]] = {name: {HERE} for name in results}
    for task in tasks:
        for name in task.reads:
            reading.setdefault(name, set()).add(queue_of(task))
    shared = {name for name, readers in reading.items() if len(readers) > 1}
    written = {name: queue_of(task) for task in tasks for name in task.writes}
    crossing = frozenset(
        name for name, queue in written.items() if reading.get(name, {queue}) != {queue}
    )
    last_reader = {name: at for at, task in enumerate(tasks) for name in task.reads}
    last_reader |= dict.fromkeys(results, len(tasks))
    queues: dict[str, list[Routed]] = {}
    for at, task in enumerate(tasks):
        entry = Routed(
            task,
            last=tuple(
                name
                for name in dict.fromkeys(task.reads)
                if last_reader[name] == at and name not in shared
            ),
            shared=tuple(name for name in task.reads if name in shared),
            crossing=tuple(name for name in task.writes if name in crossing),
            unread=tuple(name for name in task.writes if name not in reading),
        )
        queues.setdefault(queue_of(task), []).append(entry)
    # The queue that reports the bytes of all messages starts last: it waits for the other queues.
    last_queue = written.get(BYTES)
    reads = [*results, *(name for task in tasks for name in task.reads)]
    return Routes(
        queues={
            queue: tuple(queues[queue]) for queue in sorted(queues, key=lambda q: q == last_queue)
        },
        inputs=tuple(name for name in reading if name not in written),
        results=tuple(results),
        crossing=crossing,
        readers=Counter(name for name in reads if name in shared),
    )


class Queues:
    """Tasks that wait for each other across threads."""

    def __init__(
        self, routes: Routes, values: Mapping[Value, Any], futures: Mapping[Value, Future[Any]]
    ) -> None:
        """Makes a future for each value that crosses from one queue to another.

        `values` holds the initial values or futures of them. A value is dropped as soon as its last
        reader has it, so that its memory can be reused. `futures` holds those that are already
        waited for, by value.
        """
        self._routes = routes
        self._readers = dict(routes.readers)
        self._lock = Lock()
        self._values: dict[Value, Any] = {n: values[n] for n in routes.inputs if n in values}
        # A promise would wait if it were asked whether it is true.
        self._values |= {name: futures.get(name, Future()) for name in routes.crossing}

    def results(self) -> dict[Value, Any]:
        """The results or futures of them, once the calling thread's queue has ended."""
        return {name: self._values[name] for name in self._routes.results}

    def work(self, queue: str, do: Do, idle: Callable[[], None] = lambda: None) -> None:
        """Runs the tasks of a queue; `idle` is called before it waits for a value, and at the end.

        An error also reaches the readers of the queue's remaining values, so that none hangs.
        """
        tasks = self._routes.queues.get(queue, ())
        done = 0
        try:
            for entry in tasks:
                self._store(entry, do(entry.task, self._take(entry, idle)))
                done += 1
            idle()
        except BaseException as error:
            self._fail(tasks[done:], error)
            raise

    def fail(self, queue: str, error: BaseException) -> None:
        """Passes an error to the readers of all values of a queue that cannot run."""
        self._fail(self._routes.queues.get(queue, ()), error)

    def _fail(self, tasks: Sequence[Routed], error: BaseException) -> None:
        for name in (name for entry in tasks for name in entry.task.writes):
            promise = self._values.get(name)
            if isinstance(promise, Future) and not promise.done():
                promise.set_exception(error)

    def _take(self, entry: Routed, idle: Callable[[], None]) -> list[Any]:
        values = [self._values[name] for name in entry.task.reads]
        if not all(x.done() for x in values if isinstance(x, Future)):
            idle()
        inputs = list(map(awaited, values))
        for name in entry.last:
            del self._values[name]
        with self._lock:
            for name in entry.shared:
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._values[name]
        return inputs

    def _store(self, entry: Routed, outputs: Sequence[Any]) -> None:
        written = dict(zip(entry.task.writes, outputs, strict=True))
        for name in entry.crossing:
            self._values[name].set_result(written.pop(name))
        for name in entry.unread:
            del written[name]
        self._values.update(written)
