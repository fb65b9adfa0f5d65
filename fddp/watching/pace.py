"""The pace of this rank: times of its last steps, and the part of them in which it did not wait for other ranks.

Source: `DDPLoggingData` in PyTorch's `logger.cpp`, which keeps averages of such times, on each rank for itself.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 20  # number of last steps that count; one pause among them does not change the quartile
OFTEN = 10  # once there are as many steps, the quartile is computed only at every tenth


class Usual(NamedTuple):
    """Lower quartiles of a step's times, in seconds: three of four steps take at least as long."""

    typical: float = 0.0
    """Time from the begin of one step to the begin of the next."""
    between: float = 0.0
    """Time from the end of one step to the begin of the next; 0 where Python does not wait for a step to end."""
    inside: float = 0.0
    """Time from the begin of a step to its end."""
    computing: float = 0.0
    """Time in tasks that compute; 0 in a step that is one program, whose tasks cannot be told apart."""


class Pace:
    """The times of the last steps."""

    def __init__(self) -> None:
        self.usual = Usual()
        self._last = [deque[float](maxlen=STEPS) for _ in Usual._fields]
        self._began = self._ended = 0.0
        self._steps = 0
        self._hidden = False

    def begin(self, now: float) -> None:
        """Notes that a step begins.

        Args:
          now: time on a clock, in seconds.
        """
        self._steps += 1
        if self._steps > 2:  # the first one compiles
            self._last[0].append(now - self._began)
            self._last[1].append(0.0 if self._hidden else now - self._ended)
        self._began = now

    def end(self, now: float, computing: float, *, hidden: bool) -> None:
        """Notes that the step ends.

        Args:
          now: time on the same clock, in seconds.
          computing: seconds that it computed.
          hidden: whether it was only launched, and ends later.
        """
        if self._steps > 2:
            self._last[2].append(now - self._began)
            self._last[3].append(computing)
            if self._steps < OFTEN or self._steps % OFTEN == 0:
                self.usual = Usual(*map(_lower_quartile, self._last))
        self._ended = now
        self._hidden = hidden


def _lower_quartile(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]
