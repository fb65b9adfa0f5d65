"""Runs tasks in several queues, each in its order on a thread of its own; futures carry values between queues."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeAlias

import jax

from fddp.schedules.tasks import Task

# Does a task: (task, values that it reads) → values that it writes.
Do: TypeAlias = Callable[[Task, Sequence[Any]], Sequence[Any]]


class Promise(Future[Any]):
    """An array that is still being made, of a known form."""

    def __init__(self, form: jax.ShapeDtypeStruct) -> None:
        super().__init__()
        self.form = form
        self.shape = form.shape
        self.dtype = form.dtype


def forms_promised(tree: Any) -> Any:
    """Replaces each promise in a tree by its form."""
    return jax.tree.map(lambda x: x.form if isinstance(x, Promise) else x, tree)


class Queues:
    """Tasks that wait for each other across threads."""

    def __init__(
        self,
        tasks: Sequence[Task],
        values: Mapping[str, Any],
        kept: Iterable[str],
        promise: Callable[[str], Future[Any]] = lambda name: Future(),
    ) -> None:
        """Makes a future for each value that a task writes and another one reads, and for each that is kept.

        Args:
          tasks: of all queues.
          values: those that are there at first, or futures of them.
          kept: names of values that are wanted in the end. All others are dropped as soon as their last reader has
            them, so that their memory can be used again.
          promise: (name) → the future of a value that is kept.
        """
        self.kept = {name: promise(name) for name in kept}
        self._readers = Counter(name for task in tasks for name in task.reads)
        self._lock = Lock()
        written = {name for task in tasks for name in task.writes}
        read = {name: self.kept.get(name) or Future[Any]() for name in written & self._readers.keys()}
        given = {name: values[name] for name in values.keys() & self._readers.keys()}
        self._there: dict[str, Any] = {**given, **self.kept, **read}

    def work(self, queue: Sequence[Task], do: Do, idle: Callable[[], None] = lambda: None) -> None:
        """Does the tasks of a queue. An error also reaches all who wait for the rest of it, so that nobody hangs.

        Args:
          queue: in order.
          do: does a task.
          idle: is called before a task has to be waited for, and at the end.
        """
        done = 0
        try:
            for task in queue:
                self._keep(task, do(task, self._take(task, idle)))
                done += 1
            idle()
        except BaseException as error:
            for name in (name for task in queue[done:] for name in task.writes):
                if promise := self._promised(name):
                    promise.set_exception(error)
            raise

    def _take(self, task: Task, idle: Callable[[], None]) -> list[Any]:
        there = [self._there[name] for name in task.reads]
        if not all(x.done() for x in there if isinstance(x, Future)):
            idle()
        read = [x.result() if isinstance(x, Future) else x for x in there]
        with self._lock:
            self._readers.subtract(task.reads)
            for name in task.reads:
                if not self._readers[name]:
                    self._there.pop(name, None)
        return read

    def _keep(self, task: Task, made: Sequence[Any]) -> None:
        for name, value in zip(task.writes, made, strict=True):
            if promise := self._promised(name):
                promise.set_result(value)

    def _promised(self, name: str) -> "Future[Any] | None":
        promise = self._there.get(name)
        return promise if isinstance(promise, Future) and not promise.done() else None
