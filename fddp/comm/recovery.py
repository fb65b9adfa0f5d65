"""A rank that catches its error may try again, if all ranks are where it is."""

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

PATIENCE_S = 10.0


class Recovery:
    """What a rank has sent to its group, and whether it may send again after an error.

    If a rank failed alone between its messages and then began anew, its first one would meet a later one of the others.
    """

    def __init__(self, meet: Callable[[int, float], bool]) -> None:
        """Args:
        meet: (place, seconds) → whether all ranks ask this with the same place, within so many seconds of the first;
            all get the same answer, by other means than messages.
        """
        self._meet, self._lock = meet, threading.Lock()
        self._sent = self._before = 0
        self._failed = self._lost = False

    def sends(self) -> None:
        """Notes that a message leaves; on any thread."""
        with self._lock:
            self._sent += 1

    def __enter__(self) -> None:
        """A step begins: it will note an error that comes after messages have left."""
        self.resume()
        self._before = self._sent

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._failed = self._sent > self._before

    def fail(self) -> None:
        """Notes an error that came when no step was there to note it, and does what the next step does after one.

        Raises:
          RuntimeError: as `resume`.
        """
        self._failed = True
        self.resume()

    def resume(self) -> None:
        """After such an error, makes sure that all ranks are at the same place.

        Raises:
          RuntimeError: they are not, or did not come in time.
        """
        if self._failed and not self._lost:
            self._lost = True
            atexit.register(_leave)
            if self._meet(self._sent, PATIENCE_S):
                self._failed = self._lost = False
                atexit.unregister(_leave)
        if self._failed:
            raise RuntimeError(
                f"an earlier error left this rank at message {self._sent} of its group, and not all ranks came back "
                f"from an error there within {PATIENCE_S:g} s: what they send would no longer fit together. Start the "
                "script anew on all ranks; a group cannot be made anew while some of its ranks wait inside a step."
            )


def mpi_meet(comm: Any) -> Callable[[int, float], bool]:
    """How ranks of MPI meet, on a communicator that nothing else uses."""
    kept: list[Any] = []  # MPI may write there when nobody waits any more

    def gather(number: int) -> tuple[np.ndarray, Callable[[], bool]]:
        mine, numbers = np.array([number], int), np.zeros(comm.size, int)
        kept.append((comm.Iallgather(mine, numbers), mine, numbers))
        return numbers, kept[-1][0].Test

    def meet(place: int, seconds: float) -> bool:
        places, came = gather(place)
        together = poll(came, seconds) and bool(np.all(places == place))
        # Asked again, so that who comes too late hears that another has given up.
        answers, told = gather(together)
        return together and poll(told, math.inf) and bool(np.all(answers))

    return meet


def service_meet(find_client: Callable[[], Any], processes: Sequence[int]) -> Callable[[int, float], bool]:
    """How processes of jax.distributed meet, at its coordination service, of which they have a client by then."""

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
    """Asks until the answer is yes or the time is over."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _leave() -> None:
    """Ends a process as failed that others wait for, even if it caught the error that told it so."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(1.0)  # others may be ending by themselves
    os._exit(1)
