"""The pace of this rank: times of its last steps, with and without the waits for other ranks.

Source: `DDPLoggingData` in PyTorch's `logger.cpp`, which keeps averages of such times per rank.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 20  # number of last steps that count; a single pause does not change the quartile
OFTEN = 10  # from this step on the quartile is computed only every tenth step


class Usual(NamedTuple):
    """Lower quartiles of a step's times, in seconds: three of four steps take at least as long."""

    typical: float = 0.0
    """Time from the start of one step to the start of the next."""
    between: float = 0.0
    """Time from the end of one step to the start of the next; 0 after an asynchronous step."""
    inside: float = 0.0
    """Time from the start of a step to its end."""
    computing: float = 0.0
    """Time in compute tasks; 0 for a step of one program, where tasks are not separate."""


class StepTimes:
    """The times of the last steps."""

    def __init__(self) -> None:
        self.usual = Usual()
        self._last = deque[Usual](maxlen=STEPS)
        self._began = self._ended = 0.0
        self._steps = 0
        self._hidden = False

    def add(self, begin: float, end: float, computing: float, *, hidden: bool) -> None:
        """Adds a step by its start, end and seconds of computation.

        An asynchronous step (`hidden`) is only launched, and ends later.
        """
        self._steps += 1
        if self._steps > 2:  # the first one compiles
            between = begin - self._ended
            if self._hidden:
                between = 0.0
            self._last.append(Usual(begin - self._began, between, end - begin, computing))
            if self._steps < OFTEN or self._steps % OFTEN == 0:
                self.usual = Usual(*map(_lower_quartile, zip(*self._last)))
        self._began = begin
        self._ended = end
        self._hidden = hidden


def _lower_quartile(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]
