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
        self._last = [deque[float](maxlen=STEPS) for _ in Usual._fields]
        self._began = self._ended = 0.0
        self._steps = 0
        self._hidden = False

    def begin(self, time_s: float) -> None:
        """Records the start of a step."""
        self._steps += 1
        if self._steps > 2:  # the first one compiles
            self._last[0].append(time_s - self._began)
            self._last[1].append(0.0 if self._hidden else time_s - self._ended)
        self._began = time_s

    def end(self, time_s: float, computing: float, *, hidden: bool) -> None:
        """Records the end of a step and its seconds of computation.

        An asynchronous step (`hidden`) is only launched, and ends later.
        """
        if self._steps > 2:
            self._last[2].append(time_s - self._began)
            self._last[3].append(computing)
            if self._steps < OFTEN or self._steps % OFTEN == 0:
                self.usual = Usual(*map(_lower_quartile, self._last))
        self._ended = time_s
        self._hidden = hidden


def _lower_quartile(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]
