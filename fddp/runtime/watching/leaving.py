"""The end of a process: waiting for a condition, flushing its output, and leaving at once."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress


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
