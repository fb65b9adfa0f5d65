"""One rank's error ends all ranks, with that rank's message shown.

A rank that dies alone leaves the others waiting inside a collective for ever. So an exception that nobody catches
first asks whether the other ranks failed too (an error that all can see, a bad option say): then each ends by itself.
If not, the world is taken down.
"""

import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

GRACE_S = 5.0


class Ending(NamedTuple):
    """How ranks learn of each other's failure."""

    tell: Callable[[str], None]
    """Records this rank's message for the others."""
    all_failed: Callable[[float], bool]
    """Whether every rank fails within so many seconds."""
    cause: Callable[[], str | None]
    """Another rank's message, if one failed before."""
    abort: Callable[[], None]
    """Ends this process at once, and with it the others."""


def end_together(rank: int, size: int, ending: Ending) -> None:
    """Makes an uncaught exception on one rank end the script on all of them.

    Args:
      rank: this process.
      size: number of processes.
      ending: the transport's means.
    """

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        name = f"fddp: rank {rank} of {size}"
        message = f"{kind.__name__}: {error}"
        cause = ending.cause()
        ending.tell(f"rank {rank}: {message}")
        together = ending.all_failed(GRACE_S)
        if cause is not None:
            text = f"{name} ends because of {cause}\n"
        elif together and rank > 0:
            text = f"{name} failed as the others did: {message}\n"
        else:
            text = f"{name} failed:\n{''.join(traceback.format_exception(kind, error, trace))}"
        # One write: the lines of several ranks must not interleave.
        sys.stderr.write(text)
        sys.stderr.flush()
        sys.stdout.flush()
        if not together:
            ending.abort()

    sys.excepthook = on_exception


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Asks until the answer is yes or the time is over."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
