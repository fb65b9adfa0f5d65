"""Reports on stderr while a process is busy."""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CLEAR = "\x1b[K"  # erases the rest of the line


@contextmanager
def reports(state: Callable[[], str], first_s: float, next_s: float) -> Iterator[None]:
    """Prints `fddp: {state()}` on stderr after `first_s` seconds, then every `next_s` seconds."""
    done = threading.Event()
    # A thread reports: the block may be inside one call for minutes.
    thread = threading.Thread(target=_report, args=(state, done, first_s, next_s), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process can have no more threads, and gets no reports
        done.set()
    try:
        yield
    finally:
        if not done.is_set():
            done.set()
            thread.join()


def _report(state: Callable[[], str], done: threading.Event, first_s: float, next_s: float) -> None:
    rewritten = False
    seconds = first_s
    with suppress(OSError, ValueError):  # stderr is closed, or its reader is gone
        while not done.wait(seconds):
            seconds = next_s
            text = f"fddp: {state()}"
            rewritten = sys.stderr.isatty() and len(text) < shutil.get_terminal_size().columns
            if rewritten:
                print(f"\r{text}{CLEAR}", end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)
        if rewritten:
            print(file=sys.stderr, flush=True)
