"""The journal of a process, which records its progress."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """The last finding of the watchers of all ranks."""

    end: bool
    """True if this rank must end."""
    words: str
    """The reason, as text for the user."""


class Journal:
    """The journal of an unwatched process, one for all its groups: it records requests to stop."""

    broken = False
    """True after an error inside a step: this rank may be at another message than the others."""

    def __init__(self) -> None:
        self._asked_to_stop = False

    def step(self, processes: int) -> AbstractContextManager[None]:
        """Records a step of this many processes, from its first task to its last."""
        return nullcontext()

    def call(self, name: str, processes: int) -> AbstractContextManager[None]:
        """Records a collective of the hosts of this many processes."""
        return nullcontext()

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Names a call of all ranks, in the records of the collectives in the block."""
        return nullcontext()

    def message(self, name: str, nbytes: int) -> AbstractContextManager[None]:
        """Records a message until its sum is received; on any thread."""
        return nullcontext()

    def say(self, doing: str) -> None:
        """Records the current activity of the main thread."""

    def between(self) -> None:
        """Records that the main thread is between two steps, and makes progress."""

    def launched(self, result: Any) -> None:
        """Records the results of an asynchronous step, which ends when the last is ready."""

    def goes_on(self, after: int) -> None:
        """Records the number of the saved step from which this process continues."""

    def finding(self) -> Finding:
        """Reads the watchers' finding so far."""
        return Finding(False, "")

    def ask_to_stop(self) -> None:
        """Requests that this process end soon; safe in a signal handler."""
        self._asked_to_stop = True

    def stops(self) -> bool:
        """Returns True if all ranks stop now: the n-th call gets the same answer on every rank."""
        return self._asked_to_stop

    def refuse_broken(self) -> None:
        """Raises a RuntimeError after an error inside a step."""
        if self.broken:
            raise RuntimeError(
                "an earlier error inside a step left this rank at another message than the other "
                "ranks, and the next ones would no longer match: restart the script on all ranks."
            )
