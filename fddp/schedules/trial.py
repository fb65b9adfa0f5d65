"""Which of several ways is the fastest here: in the first steps they take turns, and the fastest one stays."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from fddp.comm import Group

# The first step of a turn does not count: what lies under it is the other way's.
TURNS, STEPS = 3, 4
TRIED = 2 * TURNS * STEPS  # steps after which the faster one of two ways stays


class Trial:
    """Ways of which each takes a few steps in turn, until it is known how long each takes.

    Rank 0 says at the first step of each turn whose it is. All ranks call a step equally often, and after an error that
    only one has they go on where all have sent equally much, or not at all.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._steps, self._counts, self._stays = group, 0, False, False
        self._seconds = dict[int, list[float]]()
        self.latest = 0
        """The way of the last step."""

    def way(self, ways: int) -> int:
        """Which one the next step takes; every rank calls it at the same step.

        Args:
          ways: how many there are, the same on all ranks.

        Returns:
          Its number, the same on all ranks.
        """
        if ways > 1 and not self._stays:
            turn, place = divmod(self._steps, STEPS)
            self._steps, self._counts = self._steps + 1, place > 0
            if place == 0:
                self._group.lane.wait()
                own = np.array(self._next(turn, ways), np.uint8)
                self.latest, self._stays = self._group.hosts.broadcast(own, 0).tolist()
        return self.latest

    def took(self, seconds: float) -> None:
        """Notes what a step took that has returned."""
        if self._counts and not self._stays:
            self._seconds.setdefault(self.latest, []).append(seconds)

    def _next(self, turn: int, ways: int) -> Sequence[int]:
        """Whose turn it is, and 1 if the others have none any more."""
        if turn < ways * TURNS:
            return turn % ways, 0
        return min(self._seconds, key=lambda way: median(self._seconds[way]), default=0), 1
