"""Recovery from an error: a rank that catches it may go on, if all ranks are at the same message."""

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
    """Counts the messages of a rank to its group, and decides whether it may send again after an error.

    If a rank alone failed between its messages and then began anew, its first message would meet a later one of the
    other ranks.
    """

    def __init__(self, meet: Callable[[int, float], bool]) -> None:
        """Args:
        meet: (place, seconds) → whether all ranks ask with the same place, within so many seconds of the first. All get
            the same answer. It must not use the messages of the group.
        """
        self._meet = meet
        self._lock = threading.Lock()
        self._sent = self._before = 0
        self._failed = self._lost = False

    def sends(self) -> None:
        """Notes that a message leaves; on any thread."""
        with self._lock:
            self._sent += 1

    def __enter__(self) -> None:
        """Begins a step, whose end notes an error that came after messages had left."""
        self.resume()
        self._before = self._sent

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._failed = self._sent > self._before

    def fail(self) -> None:
        """Notes an error outside any step, and makes sure, as the next step would, that all ranks are at one place.

        Raises:
          RuntimeError: as in `resume`.
        """
        self._failed = True
        self.resume()

    def resume(self) -> None:
        """Makes sure, after an error that was noted, that all ranks are at the same message.

        Raises:
          RuntimeError: they are not, or did not come in time.
        """
        if self._failed and not self._lost:
            self._lost = True
            atexit.register(leave, 1.0)  # the script may catch the error, and others wait for this process
            if self._meet(self._sent, PATIENCE_S):
                self._failed = self._lost = False
                atexit.unregister(leave)
        if self._failed:
            raise RuntimeError(
                f"an earlier error left this rank at message {self._sent} of its group, and not all ranks came back "
                f"from an error there within {PATIENCE_S:g} s: what they send would no longer fit together. Start the "
                "script anew on all ranks; a group cannot be made anew while some of its ranks wait inside a step."
            )


def mpi_meet(comm: Any) -> Callable[[int, float], bool]:
    """Makes the `meet` of MPI's ranks, on a communicator that nothing else uses."""
    kept: list[Any] = []  # buffers live on: MPI may write into them after a rank has given up waiting

    def gather(number: int) -> tuple[np.ndarray, Callable[[], bool]]:
        mine = np.array([number], int)
        numbers = np.zeros(comm.size, int)
        kept.append((comm.Iallgather(mine, numbers), mine, numbers))
        return numbers, kept[-1][0].Test

    def meet(place: int, seconds: float) -> bool:
        places, came = gather(place)
        together = poll(came, seconds) and bool(np.all(places == place))
        # A second round: a rank that comes too late hears that another has given up.
        answers, told = gather(together)
        return together and poll(told, math.inf) and bool(np.all(answers))

    return meet


def service_meet(find_client: Callable[[], Any], processes: Sequence[int]) -> Callable[[int, float], bool]:
    """Makes the `meet` of jax.distributed's processes at its coordination service; finds the client only then."""

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
    """Asks until `done()` is true or the seconds are over; returns whether it was true."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def leave(after_s: float = 0.0) -> None:
    """Ends this process with status 1, whatever the script catches; what it has printed is seen.

    Args:
      after_s: seconds to wait before, as others may be ending by themselves.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    time.sleep(after_s)
    os._exit(1)
