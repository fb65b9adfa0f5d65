"""Tries several ways in turn in the first steps, and keeps the fastest one."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from fddp.comm import Group

TURNS = 3  # that each way takes
STEPS = 4  # in a turn; the first one does not count: it overlaps the end of a step of the other way
TRIED = 2 * TURNS * STEPS  # steps after which the faster one of two ways stays


class Trial:
    """Lets ways take a few steps in turn, until it is known how long each one takes.

    Rank 0 decides at the first step of each turn which way takes it. All ranks get there together, for they call a step
    equally often. After an error on one rank alone they go on where all have sent equally much, or not at all.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._steps = 0
        self._counts = False
        self._stays = False
        self._seconds = dict[int, list[float]]()
        self.latest = 0
        """The way of the last step."""

    def way(self, ways: int) -> int:
        """Picks the way that the next step takes; every rank calls it at the same step.

        Args:
          ways: how many there are, the same on all ranks.

        Returns:
          Its number, the same on all ranks.
        """
        if ways > 1 and not self._stays:
            turn, place = divmod(self._steps, STEPS)
            self._steps += 1
            self._counts = place > 0
            if place == 0:
                self._group.lane.wait()
                own = np.array(self._next(turn, ways), np.uint8)
                self.latest, self._stays = self._group.hosts.broadcast(own, 0).tolist()
        return self.latest

    def took(self, seconds: float) -> None:
        """Notes how long the step took that has just returned."""
        if self._counts and not self._stays:
            self._seconds.setdefault(self.latest, []).append(seconds)

    def _next(self, turn: int, ways: int) -> Sequence[int]:
        """The way whose turn it is, and 1 if it stays for good."""
        if turn < ways * TURNS:
            return turn % ways, 0
        return min(self._seconds, key=lambda way: median(self._seconds[way]), default=0), 1
