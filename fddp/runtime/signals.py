"""Signals to a process that has started ranks."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected(*numbers: int) -> Iterator[list[int]]:
    """Collects signals while its block runs: none interrupts it, and none is lost in a callback of another library.

    Args:
      *numbers: the signals; those that this process ignores, as nohup has it, stay ignored.

    Yields:
      The numbers of the signals so far.
    """
    signals = list[int]()
    before = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
