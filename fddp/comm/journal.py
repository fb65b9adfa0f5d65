"""The journal of a process: callbacks that record its progress.

They do nothing in an unwatched process; `fddp.runtime.watching` makes those of a watched process.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """The last finding of the watchers of all ranks."""

    end: bool
    """True if this rank must end."""
    words: str
    """The reason, as text for the user."""


def _block(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _note(*_: Any) -> None: ...


@dataclass
class Journal:
    """Callbacks by which a process records its progress, shared by all of its groups."""

    step: Callable[[int], AbstractContextManager[None]] = _block
    """`step(processes)`: records a step of this many processes, from its first task to its last."""
    call: Callable[[str, int], AbstractContextManager[None]] = _block
    """`call(name, processes)`: records a collective of the hosts of this many processes."""
    inside: Callable[[str], AbstractContextManager[None]] = _block
    """`inside(name)`: names a call of all ranks, in the records of the collectives in the block."""
    message: Callable[[str, int], AbstractContextManager[None]] = _block
    """`message(name, nbytes)`: records a message until its sum is received; on any thread."""
    say: Callable[[str], None] = _note
    """Records the current activity of the main thread."""
    between: Callable[[], None] = _note
    """Records that the main thread is between two steps, and makes progress."""
    launched: Callable[[Any], None] = _note
    """Records the results of an asynchronous step, which ends when the last of them is ready."""
    adds: Callable[[int], None] = _note
    """`adds(processes)`: records a batch without a message, for a later step of this many
    processes."""
    goes_on: Callable[[int], None] = _note
    """Records the number of the saved step from which this process continues."""
    stall_s: float = 30.0
    """Seconds without progress after which this process counts as stalled while it waits for
    others."""
    finding: Callable[[], Finding] = lambda: Finding(False, "")
    """Reads the watchers' finding so far."""
    ask_to_stop: Callable[[], None] = _note
    """Requests that this process end soon; safe in a signal handler."""
    stops: Callable[[], bool] = lambda: False
    """Returns True if all ranks stop now: the n-th call gets the same answer on every rank."""
    broken: bool = False
    """True after an error inside a step: this rank may be at another message than the others."""

    def refuse_broken(self) -> None:
        """Raises a RuntimeError after an error inside a step."""
        if self.broken:
            raise RuntimeError(
                "an earlier error inside a step left this rank at another message than the other "
                "ranks, and the next ones would no longer match: restart the script on all ranks."
            )


def unwatched() -> Journal:
    """Makes the journal of an unwatched process, which records only requests to stop."""
    requests = list[bool]()
    return Journal(ask_to_stop=lambda: requests.append(True), stops=lambda: bool(requests))
