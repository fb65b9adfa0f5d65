"""One rank's error ends all ranks, with that rank's message shown.

A rank that dies alone leaves the others waiting inside a collective for ever. So an exception that nobody catches first
asks whether the other ranks fail too (an error that all can see, a bad option say): then each ends by itself. If not,
the world is taken down. `sys.exit` with a status other than 0 counts as such an exception, even where it is caught;
`raise SystemExit` goes unnoticed.
"""

import atexit
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

GRACE_S = 5.0


class Ending(NamedTuple):
    """How ranks learn of each other's failure."""

    tell: Callable[[str], None]
    """Records this rank's message for the others."""
    all_failed: Callable[[float], bool]
    """Whether every rank fails within so many seconds."""
    cause: Callable[[], str | None]
    """The message of a rank that took the world down, if one did."""
    abort: Callable[[], None]
    """Ends this process at once, and with it the others."""


def end_together(rank: int, size: int, ending: Ending) -> None:
    """Makes an uncaught exception on one rank end the script on all of them.

    Args:
      rank: this process.
      size: number of processes.
      ending: the transport's means.

    Raises:
      ValueError: the environment's grace is no number of seconds.
    """
    grace_s = read_grace(os.environ)

    def end(message: str, details: str) -> None:
        name = f"fddp: rank {rank} of {size}"
        cause = ending.cause()
        if cause is not None:
            _write(f"{name} ends because of {cause}\n")
            ending.abort()
        ending.tell(f"rank {rank}: {message}")
        together = ending.all_failed(grace_s)
        _write(f"{name} failed as the others did: {message}\n" if together and rank else f"{name} failed:\n{details}")
        if not together:
            ending.abort()

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end(f"{kind.__name__}: {error}", "".join(traceback.format_exception(kind, error, trace)))

    sys.excepthook = on_exception
    _on_exit(lambda status: end(f"sys.exit({status!r})", f"sys.exit({status!r})\n"))


def read_grace(env: Mapping[str, str]) -> float:
    """How long a rank that fails waits for the others to fail as well.

    Args:
      env: environment variables, as `os.environ`.

    Returns:
      Seconds: `FDDP_GRACE_S`, or five.

    Raises:
      ValueError: it is no number of 0 or more.
    """
    text = env.get("FDDP_GRACE_S", str(GRACE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"FDDP_GRACE_S must be a number of seconds of 0 or more, got {text!r}.")
    return seconds


def _on_exit(act: Callable[[Any], None]) -> None:
    """Acts when the interpreter ends after `sys.exit(status)` with another status than 0."""
    leave, statuses = sys.exit, []

    def exit_noted(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends only its thread
            statuses.append(status)
        leave(status)

    # The exit hook cannot see the status, and only it knows that nobody caught the SystemExit.
    sys.exit = exit_noted
    atexit.register(lambda: act(statuses[-1]) if statuses and statuses[-1] not in (None, 0) else None)


def _write(text: str) -> None:
    # One write: the lines of several ranks must not interleave.
    sys.stderr.write(text)
    sys.stderr.flush()
    sys.stdout.flush()
