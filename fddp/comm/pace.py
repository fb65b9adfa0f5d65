"""How long the last steps of this rank took, and what of that was its own part: not waiting for the others.

Source: `DDPLoggingData` in PyTorch's `logger.cpp`, which keeps the same averages, on each rank for itself.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 20  # that are looked at: a pause now and then is no pace
OFTEN = 10  # so rarely they are looked at, once there are as many


class Usual(NamedTuple):
    """Seconds that three of four steps take at least."""

    typical: float = 0.0
    """From its begin to the next one's."""
    between: float = 0.0
    """From the end of the last one to its begin; 0 where nobody knows when it ends, as Python does not wait for it."""
    inside: float = 0.0
    """From its begin to its end."""
    computing: float = 0.0
    """In tasks that compute; 0 where nobody sees them, in a step that is one program."""


class Pace:
    """The times of the last steps."""

    def __init__(self) -> None:
        self.usual = Usual()
        self._last = [deque[float](maxlen=STEPS) for _ in Usual._fields]
        self._began = self._ended = 0.0
        self._steps, self._hidden = 0, False

    def begin(self, now: float) -> None:
        """Notes that a step begins.

        Args:
          now: seconds of a clock.
        """
        self._steps += 1
        if self._steps > 2:  # the first one compiles
            self._last[0].append(now - self._began)
            self._last[1].append(0.0 if self._hidden else now - self._ended)
        self._began = now

    def end(self, now: float, computing: float, *, hidden: bool) -> None:
        """Notes that it ends.

        Args:
          now: seconds of the same clock.
          computing: seconds that it computed.
          hidden: whether it was launched only, and ends later.
        """
        if self._steps > 2:
            self._last[2].append(now - self._began)
            self._last[3].append(computing)
            if self._steps < OFTEN or self._steps % OFTEN == 0:
                self.usual = Usual(*map(_lower_quartile, self._last))
        self._ended, self._hidden = now, hidden


def _lower_quartile(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]
