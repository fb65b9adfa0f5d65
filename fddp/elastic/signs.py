"""Signs of life of the members, to find silent ones and those outside of a common step."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

BEAT_S = 0.25
# A member may be longer outside of a step, since it may evaluate or wait for data.
BETWEEN = 20


class Limits(NamedTuple):
    """The limits of a job."""

    most: int
    """Members of a view at most."""
    silence_s: float
    """Seconds after which a silent member is lost."""
    stall_s: float
    """A member that is outside of a step is lost after `BETWEEN` times as many seconds."""


class Signs:
    """When the other members were heard, and where each is."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._looked_at = self._since = time.monotonic()
        self._heard_at = dict[str, float]()
        self._places = dict[str, tuple[int, bool]]()  # uid → step, True inside of it
        self.stepped = False
        """True if this member has done a step in this view."""
        self.left = dict[str, int]()
        """uid of a member with an ended script → its number of steps."""
        self._number = 0
        self.done = 0
        """Steps that this member has done."""
        self._entered_at: float | None = None

    def restart(self) -> None:
        self.stepped = False
        self._since = time.monotonic()
        self._heard_at.clear()
        self._places.clear()

    def hear(self, uid: str) -> None:
        self._heard_at[uid] = time.monotonic()

    def place(self, uid: str, number: int, inside: bool) -> None:
        self._places[uid] = number, inside

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        self._number, self._entered_at = number, time.monotonic()
        try:
            yield
            self.done, self.stepped = number + 1, True
        finally:
            self._entered_at = None

    @property
    def own_place(self) -> tuple[int, bool]:
        """This member's step, and True if it is inside of it."""
        return self._number, self._entered_at is not None

    def lost(self, uids: Iterable[str]) -> list[str]:
        now = time.monotonic()
        paused = now - self._looked_at > self._limits.silence_s / 2  # this process was stopped
        self._looked_at = now
        if paused:
            self.restart()
        return [uid for uid in uids if self._is_lost(uid, now)]

    def _is_lost(self, uid: str, now: float) -> bool:
        if uid in self.left:
            return self._entered_at is not None and self._number >= self.left[uid]
        if now - self._heard_at.get(uid, self._since) > self._limits.silence_s:
            return True
        if self._entered_at is None or now - self._entered_at < BETWEEN * self._limits.stall_s:
            return False
        number, inside = self._places.get(uid, (0, False))
        return not inside or number < self._number
