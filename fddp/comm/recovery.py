"""Recovery from an error: ranks may continue after it if all are at the same message."""

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

PATIENCE_S = 10.0


class Recovery:
    """Counts the messages of a rank to its group, and decides whether it may send after an error.

    If a single rank failed between its messages and started a step again, its first message would
    meet a later message of the other ranks.
    """

    def __init__(self, meet: Callable[[int, float], bool]) -> None:
        """Stores `meet(place, seconds)`, which sends none of the group's messages.

        It returns True on every rank if all call it with the same place, within `seconds` of the
        first call.
        """
        self._meet = meet
        self._lock = threading.Lock()
        self._sent = self._before = 0
        self._failed = self._lost = False

    def sends(self) -> None:
        """Counts a message before it is sent, on any thread."""
        with self._lock:
            self._sent += 1

    def __enter__(self) -> None:
        """Begins a step; `__exit__` then records an error if the step has sent messages."""
        self.resume()
        self._before = self._sent

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._failed = self._sent > self._before

    def fail(self) -> None:
        """Records an error outside of any step, and resumes at once."""
        self._failed = True
        self.resume()

    def resume(self) -> None:
        """Compares the messages of all ranks after a recorded error.

        Raises a RuntimeError if ranks are at different messages, or not here within `PATIENCE_S`.
        """
        if self._failed and not self._lost:
            self._lost = True
            # The script may catch the error, and the other ranks wait for the end of this process.
            atexit.register(leave, 1.0)
            if self._meet(self._sent, PATIENCE_S):
                self._failed = self._lost = False
                atexit.unregister(leave)
        if self._failed:
            raise RuntimeError(
                f"an earlier error left this rank at message {self._sent} of its group, and not "
                f"all ranks returned from an error there within {PATIENCE_S:g} s: their messages "
                "would no longer match. Restart the script on all ranks; a group cannot be "
                "created again while some of its ranks wait inside a step."
            )


def mpi_meet(comm: Any) -> Callable[[int, float], bool]:
    """Makes the `meet` of MPI ranks, on an mpi4py communicator without other users."""
    # Buffers are never freed: MPI may write into them after a rank has stopped waiting.
    buffers: list[Any] = []

    def gather(number: int) -> tuple[np.ndarray, Callable[[], bool]]:
        message = np.array([number], int)
        numbers = np.zeros(comm.size, int)
        buffers.append((comm.Iallgather(message, numbers), message, numbers))
        return numbers, buffers[-1][0].Test

    def meet(place: int, seconds: float) -> bool:
        places, places_done = gather(place)
        equal = poll(places_done, seconds) and bool(np.all(places == place))
        # A second round: a rank that is too late learns that another rank has stopped waiting.
        answers, answers_done = gather(equal)
        return equal and poll(answers_done, math.inf) and bool(np.all(answers))

    return meet


def service_meet(
    find_client: Callable[[], Any], processes: Sequence[int]
) -> Callable[[int, float], bool]:
    """Makes the `meet` of processes at the coordination service of `jax.distributed`."""

    def meet(place: int, seconds: float) -> bool:
        if len(processes) == 1:
            return True
        name = f"fddp/again/{'-'.join(map(str, processes))}/{place}"
        try:
            find_client().wait_at_barrier(name, int(1000 * seconds), list(processes))
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return meet


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Polls `done()` until it is True, for at most some seconds, and returns its last result."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def leave(after_s: float = 0.0) -> None:
    """Flushes its output and ends this process with status 1, past all handlers of the script.

    It waits `after_s` seconds before, as other ranks may end by themselves.
    """
    flush_output()
    time.sleep(after_s)
    os._exit(1)


def flush_output(report: str = "") -> None:
    """Writes a report, and flushes both streams; one may be closed, full or without a reader."""
    for stream, text in ((sys.stderr, report), (sys.stdout, "")):
        with suppress(AttributeError, OSError, ValueError):
            # A single write, so that lines of several ranks do not interleave.
            stream.write(text)
            stream.flush()
