"""One rank's error ends all ranks, with that rank's message shown.

A rank that dies alone leaves the others waiting inside a collective for ever. So a rank with an exception that nobody
catches first asks whether the others fail too, as they do of a bad option, say. If they do, each ends by itself. If
not, this rank takes the world down. The watchers see a rank that dies, or leaves by `sys.exit` (`watchdog.py`).
"""

import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple

import jax

from fddp.comm import Journal, leave, poll
from fddp.watching.watcher.shared_memory import FAILED

GRACE_S = 5.0
# Seconds for which a rank with an error of the transport waits for the watchers' verdict.
VERDICT_S = 3.0


class Ending(NamedTuple):
    """The transport's means by which ranks learn of each other's failure."""

    tell: Callable[[str], None]
    """Records this rank's message for the others."""
    all_failed: Callable[[float], bool]
    """Whether every rank fails within so many seconds."""
    cause: Callable[[], str | None]
    """The message of a rank that took the world down, if one did."""
    abort: Callable[[], None]
    """Ends this process at once, and with it the others."""


def end_together(rank: int, size: int, ending: Ending, journal: Journal) -> None:
    """Makes an uncaught exception on one rank end the script on all of them.

    Args:
      rank: this process.
      size: number of processes.
      ending: the transport's means.
      journal: where this rank writes down that it fails, and its watcher why the job ends.

    Raises:
      ValueError: the environment's grace is no number of seconds.
    """
    grace_s = read_grace(os.environ)

    def end(message: str, details: str) -> None:
        journal.say(FAILED)
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

    def interrupted() -> None:
        journal.say(FAILED)
        ending.tell(f"rank {rank}: interrupted")
        together = ending.all_failed(grace_s)
        if not (together and rank):
            _write(f"fddp: rank {rank} of {size} was interrupted.\n")
        if not together:
            ending.abort()

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return interrupted()
        if follows_another(error, journal):
            leave()
        return end(f"{kind.__name__}: {error}", "".join(traceback.format_exception(kind, error, trace)))

    sys.excepthook = on_exception


def follows_another(error: BaseException, journal: Journal) -> bool:
    """Whether an error only follows from another rank's death, as a transport's may: the watchers know the cause.

    Args:
      error: what was raised on this rank.
      journal: in which its watcher writes why the job ends.

    Returns:
      Whether the watchers end the job; waits some seconds for it if the error is a transport's.
    """
    said = f"{type(error).__module__} {error}"
    if not isinstance(error, jax.errors.JaxRuntimeError) and not re.search(r"\b(Gloo|NCCL|MPI)", said):
        return False
    journal.say("after an error")
    return poll(lambda: journal.finding().end, VERDICT_S)


def read_grace(env: Mapping[str, str]) -> float:
    """Reads how long a rank that fails waits for the others to fail as well.

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


def _write(text: str) -> None:
    # One write: the lines of several ranks must not interleave.
    sys.stderr.write(text)
    sys.stderr.flush()
    sys.stdout.flush()
