"""Ends all ranks after an uncaught error on one rank, with that rank's message.

After the death of a single rank the other ranks would wait in a collective forever. So a rank with
an uncaught exception first checks whether all ranks fail, for example because of a bad option. Then
each ends by itself. Otherwise this rank takes the world down. The watchers detect a rank that dies
or leaves by `sys.exit` (`watchdog.py`).
"""

import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

import jax

from fddp.comm import Journal
from fddp.runtime.watching.watcher.shared_memory import AFTER_ERROR, FAILED

GRACE_S = 5.0
# Seconds for which a rank with a transport error waits for the watchers' verdict.
VERDICT_S = 3.0


def end_together(
    rank: int,
    size: int,
    journal: Journal,
    all_failed: Callable[[float], bool],
    abort: Callable[[], None],
    publish: Callable[[str], object] = lambda message: None,
    cause: Callable[[], str | None] = lambda: None,
) -> None:
    """Replaces `sys.excepthook`: an uncaught exception on one rank ends the script on all ranks."""
    # `all_failed(seconds)` is True if every rank fails in this time. `abort` ends this process at
    # once, and thereby the other ranks. `publish` shows them this rank's message; `cause` returns
    # the message of the rank that ended the job, None without one.
    grace_s = read_grace(os.environ)
    name = f"fddp: rank {rank} of {size}"

    def end(message: str, report: str, short_report: str) -> None:
        """Prints a short report if another rank prints the failure of all ranks."""
        publish(f"rank {rank}: {message}")
        together = all_failed(grace_s)
        if together and rank:
            report = short_report
        flush_output(report)
        if not together:
            abort()

    def on_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            journal.say(FAILED)
            return end("interrupted", f"{name} was interrupted.\n", "")
        if follows_another(error, journal):
            leave()
        journal.say(FAILED)
        if (message := cause()) is not None:
            flush_output(f"{name} ends because of {message}\n")
            abort()
        message = f"{kind.__name__}: {_text(error)}"
        details = "".join(traceback.format_exception(kind, error, trace))
        short_report = f"{name} failed as the others did: {message}\n"
        return end(message, f"{name} failed:\n{details}", short_report)

    sys.excepthook = on_exception


def follows_another(error: BaseException, journal: Journal) -> bool:
    """True if a transport error follows from another rank's end, on which the watchers decide."""
    if not from_transport(error):
        return False
    journal.say(AFTER_ERROR)
    return poll(lambda: journal.finding().end, VERDICT_S)


def from_transport(error: BaseException) -> bool:
    """True for an error of a collective, which another rank may have caused."""
    named = re.search(r"\b(Gloo|NCCL|MPI)", f"{type(error).__module__} {_text(error)}")
    return isinstance(error, jax.errors.JaxRuntimeError) or named is not None


def _text(error: BaseException) -> str:
    """The text of an exception, whose class may have a broken `__str__`."""
    try:
        return str(error)
    except Exception as problem:
        return f"its text cannot be made ({type(problem).__name__} in __str__)"


def read_grace(env: Mapping[str, str]) -> float:
    """Reads `FDDP_GRACE_S`: seconds for which a failed rank waits for all ranks to fail."""
    text = env.get("FDDP_GRACE_S", str(GRACE_S))
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ValueError(f"FDDP_GRACE_S must be a number of seconds of 0 or more, got {text!r}.")


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Polls `done()` until it is True, for at most some seconds, and returns its last result."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def leave() -> None:
    """Flushes its output and ends this process with status 1, past all handlers of the script."""
    flush_output()
    os._exit(1)


def flush_output(report: str = "") -> None:
    """Writes a report, and flushes both streams; one may be closed, full or without a reader."""
    for stream, text in ((sys.stderr, report), (sys.stdout, "")):
        with suppress(AttributeError, OSError, ValueError):
            # A single write, so that lines of several ranks do not interleave.
            stream.write(text)
            stream.flush()
