"""Notes when the tasks of steps run, also of steps that overlap."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter

from fddp.schedules.tasks import Task
from fddp.schedules.timeline import Span, Timeline


class StepLog:
    """Notes the spans of tasks on any thread. A step's timeline is cut at its begin and its end."""

    def __init__(self) -> None:
        # Threads add spans while a step reads them: `list` copies a dict in one go.
        self._spans = dict[int, Span]()
        self._numbers = count()
        self._window = (0.0, 0.0)
        self._tasks: tuple[Task, ...] = ()

    def begin(self, tasks: Sequence[Task] = ()) -> None:
        """Begins a step: forgets the spans that are over.

        Args:
          tasks: those that it launches, where all of them end with it.
        """
        now = perf_counter()
        self._tasks = tuple(tasks)
        for number in [number for number, span in list(self._spans.items()) if span.end <= now]:
            del self._spans[number]
        self._window = now, inf

    def end(self) -> None:
        """Ends the step, which returns now."""
        self._window = self._window[0], perf_counter()

    def add(self, span: Span) -> None:
        """Notes a task that is over."""
        self._spans[next(self._numbers)] = span

    @contextmanager
    def under_way(self, task: Task) -> Iterator[Callable[[Span], None]]:
        """Notes a task that begins now; yields a function that takes the task's span once it is over."""
        number = next(self._numbers)
        told = list[Span]()
        self._spans[number] = Span(task.kind, task.name, perf_counter(), inf)
        try:
            yield told.append
        finally:
            self._spans[number] = told[0] if told else replace(self._spans[number], end=perf_counter())

    def timeline(self) -> Timeline:
        """The spans of the last step; those that reach beyond its borders are cut there."""
        begin, end = self._window
        spans = [span for span in list(self._spans.values()) if span.start < end]
        spans = [replace(span, start=max(begin, span.start), end=min(end, span.end)) for span in spans]
        return Timeline(tuple(spans), self._tasks)
