"""Signals to a process that starts ranks."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_signals(*numbers: int) -> Iterator[list[int]]:
    """Collects signals while its block runs; yields the numbers of the received signals.

    No signal interrupts the block or is lost in a callback of another library. Signals that this
    process ignores, for example under nohup, stay ignored.
    """
    signals = list[int]()
    handlers = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
