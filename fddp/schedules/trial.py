"""Which of several ways is the fastest here: in the first steps they take turns, and the fastest one stays."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from fddp.comm import Group

# The first step of a turn does not count: what lies under it is the other way's.
TURNS, STEPS = 3, 4


class Trial:
    """Ways of which each takes a few steps in turn, until it is known how long each takes.

    Rank 0 says which one is next, and all hear it in the step that is meant: an error that only one rank has, or a step
    that is tried again, leaves no two ranks with different ways.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._steps, self._stays, self._seconds = group, 0, False, dict[int, list[float]]()
        self.latest = 0
        """The way of the last step."""

    def way(self, ways: int) -> int:
        """Which one the next step takes; every rank calls it at the same step.

        Args:
          ways: how many there are, the same on all ranks.

        Returns:
          Its number, the same on all ranks.
        """
        if ways == 1:
            return 0
        if not self._stays:
            self.latest, self._stays = self._group.hosts.broadcast(np.array(self._next(ways), np.uint8), 0).tolist()
        return self.latest

    def took(self, seconds: float) -> None:
        """Notes what a step took that has returned."""
        if not self._stays:
            if self._steps % STEPS:
                self._seconds.setdefault(self.latest, []).append(seconds)
            self._steps += 1

    def _next(self, ways: int) -> Sequence[int]:
        """The next one, and 1 if it stays."""
        if self._steps < ways * TURNS * STEPS:
            return self._steps // STEPS % ways, 0
        return min(self._seconds, key=lambda way: median(self._seconds[way])), 1
