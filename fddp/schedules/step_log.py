"""Records when the tasks of steps run, also of steps that overlap."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter

from fddp.schedules.tasks import Task
from fddp.schedules.timeline import Span, Timeline


class StepLog:
    """Records the spans of tasks on any thread, and cuts a step's timeline at its start and end."""

    def __init__(self) -> None:
        # Threads add spans while a step reads them: `list` copies a dict atomically.
        self._spans = dict[int, Span]()
        self._numbers = count()
        self._window = (0.0, 0.0)

    def begin(self) -> None:
        """Starts a step and forgets finished spans."""
        now = perf_counter()
        for number in [number for number, span in list(self._spans.items()) if span.end <= now]:
            del self._spans[number]
        self._window = now, inf

    def end(self) -> None:
        """Ends the step, which returns now."""
        self._window = self._window[0], perf_counter()

    def add(self, span: Span) -> None:
        """Records a finished task."""
        self._spans[next(self._numbers)] = span

    @contextmanager
    def under_way(self, task: Task) -> Iterator[Callable[[Span], None]]:
        """Records a task that starts now; yields a function that takes the finished task's span."""
        number = next(self._numbers)
        finished = list[Span]()
        self._spans[number] = Span(task.kind, task.name, perf_counter(), inf)
        try:
            yield finished.append
        finally:
            stopped = replace(self._spans[number], end=perf_counter())
            self._spans[number] = next(iter(finished), stopped)

    def timeline(self) -> Timeline:
        """The spans of the last step, cut at its start and its end."""
        begin, end = self._window
        spans = [span for span in list(self._spans.values()) if span.start < end]
        spans = [
            # A copy takes 4 µs, and each step reads its spans.
            s
            if begin <= s.start and s.end <= end
            else replace(s, start=max(begin, s.start), end=min(end, s.end))
            for s in spans
        ]
        return Timeline(tuple(spans))
