"""When the tasks of steps ran of which one begins before the one before it has ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter

from fddp.schedules.tasks import Task
from fddp.schedules.timeline import Span, Timeline


class Log:
    """Spans of tasks, on any thread; of a step are those that lie between its begin and its end, or the parts there."""

    def __init__(self) -> None:
        # Threads write spans down while a step looks: `list` of a dict is made at once.
        self._spans, self._numbers, self._window = dict[int, Span](), count(), (0.0, 0.0)

    def begin(self) -> None:
        """A step begins: what was over before is forgotten."""
        now = perf_counter()
        for number in [number for number, span in list(self._spans.items()) if span.end <= now]:
            del self._spans[number]
        self._window = now, inf

    def end(self) -> None:
        """The step returns."""
        self._window = self._window[0], perf_counter()

    def add(self, span: Span) -> None:
        """Notes a task that is over."""
        self._spans[next(self._numbers)] = span

    @contextmanager
    def under_way(self, task: Task) -> Iterator[Callable[[Span], None]]:
        """Notes a task from now on; what it gives takes the task's span, once it is over."""
        number, told = next(self._numbers), list[Span]()
        self._spans[number] = Span(task.kind, task.name, perf_counter(), inf)
        try:
            yield told.append
        finally:
            self._spans[number] = told[0] if told else replace(self._spans[number], end=perf_counter())

    def timeline(self) -> Timeline:
        """What ran during the last step: of what goes on beyond its borders the part between them."""
        begin, end = self._window
        spans = [span for span in list(self._spans.values()) if span.start < end]
        return Timeline(tuple(replace(span, start=max(begin, span.start), end=min(end, span.end)) for span in spans))
