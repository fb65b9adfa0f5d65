"""Records a rank's steps, tasks, messages and signs of life in memory shared with its watcher.

A stuck rank cannot report itself. So it records the start of each activity in shared memory; a
record costs no system call. The memory also holds the last messages, and outlives the rank.

Source: the flight recorder of PyTorch's NCCL process group.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from mmap import mmap
from operator import sub
from types import SimpleNamespace
from typing import Any

import jax

from fddp.comm import Finding, Journal
from fddp.runtime.watching.watcher import shared_memory
from fddp.runtime.watching.watcher.shared_memory import BETWEEN, ENDS, LAUNCHED, REPORT, STEP

WAIT_S = 0.01
STEPS = 20  # number of last steps in the typical time


class Recorder(Journal):
    """Records the activity of one process for its watcher."""

    def __init__(self, memory: mmap | bytearray, processes: int = 1) -> None:
        """Records into `memory`: `SIZE` bytes in the layout of `watcher/shared_memory.py`."""
        super().__init__()
        self.memory = memory
        self.processes = processes
        self._lock = threading.RLock()
        self._launched = deque[Any]()
        self._starts = deque[float](maxlen=STEPS)  # of steps of all ranks
        self._report = SimpleNamespace(**REPORT.read(bytearray(shared_memory.SIZE)))
        self._inside = False
        self._caller = ""
        self._asked_at = time.monotonic()
        self.between()

    def step(self, processes: int) -> AbstractContextManager[None]:
        self._report.steps += 1
        return self._noted(STEP, processes)

    def call(self, name: str, processes: int) -> AbstractContextManager[None]:
        if self._caller:
            name = f"{name}{shared_memory.OF}{self._caller}"
        return self._noted(name, processes)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        outer = self._caller
        self._caller = outer or name
        try:
            yield
        finally:
            self._caller = outer

    @contextmanager
    def message(self, name: str, nbytes: int) -> Iterator[None]:
        with self._lock:
            number = self._report.messages
            record = shared_memory.message(number)
            key = (number, self._report.steps, time.monotonic())
            record.write(self.memory, *key, 0.0, nbytes, name)
            self._move(messages=number + 1, sending=name)
        yield
        with self._lock:
            record.write(self.memory, *key, time.monotonic(), nbytes, name)
            self._move(sending="")

    def at(self, place: str) -> None:
        """Records the main thread's place in the script; on any thread."""
        self._write(place=place)

    def goes_on(self, after: int) -> None:
        self._report.before = after - self._report.steps
        self.between()

    def launched(self, result: Any) -> None:
        self._launched.append(jax.tree.leaves(result)[-1])
        self.say(LAUNCHED)

    def say(self, doing: str) -> None:
        """Records the current activity of the main thread; an end state (`ENDS`) is final."""
        with self._lock:
            if doing.startswith(ENDS):
                # JAX frees an array without the GIL; in a thread that Python ends, this aborts.
                self._launched.clear()
            # Python may still run exit handlers, and the last steps may be unfinished.
            if self._report.doing.startswith(ENDS):
                doing = self._report.doing
            self._move(doing=doing)

    def between(self) -> None:
        self.say(BETWEEN)

    def live(self) -> Finding:
        """Records a sign of life and the ended steps; returns the watchers' finding."""
        with self._lock:
            self._write(life=self._report.life + 1)
            self._look()
        return self.finding()

    def ask_to_stop(self) -> None:
        # The handler may have interrupted a write, which then writes the earlier value once more.
        self._write(told=True)

    def stops(self) -> bool:
        time_s = time.monotonic()
        between_s = time_s - self._asked_at
        self._asked_at = time_s
        if self.processes == 1:
            return self._report.told
        asks = self._report.asks + 1
        # The watchers propose a call that no rank has reached, as far as they know. It counts once
        # all have agreed. A rank beyond it disagrees, and the watchers propose another number.
        while True:
            proposal = shared_memory.PROPOSAL.read(self.memory)
            proposed = proposal["step"]
            agreed = proposed if asks <= proposed else -proposed
            self._write(asks=asks, between_s=between_s, agreed=agreed)
            if asks != proposed or proposal["settled"]:
                return asks == proposed
            time.sleep(WAIT_S)

    def finding(self) -> Finding:
        return Finding(**shared_memory.VERDICT.read(self.memory))

    @contextmanager
    def _noted(self, doing: str, processes: int) -> Iterator[None]:
        report = self._report
        self._inside = True
        together = report.together = processes == self.processes
        if together:
            report.calls += 1
            if doing == STEP:
                self._time_step()
        self.say(LAUNCHED if self._launched else doing)
        try:
            yield
        except BaseException:
            # The other ranks did not begin this call, or failed in it too.
            report.calls -= together
            report.steps -= doing == STEP
            raise
        finally:
            with self._lock:
                self._inside = False
                self._look(over=True)

    def _time_step(self) -> None:
        """Updates the lower quartile of step times; a single pause does not change it."""
        if self._report.steps > 2:  # the first step compiles, and has no step before it
            self._starts.append(time.monotonic())
            times = sorted(map(sub, islice(self._starts, 1, None), self._starts))
            if times:
                self._report.typical = times[len(times) // 4]

    def _look(self, over: bool = False) -> None:
        """Removes the ended ones of the launched steps, which end in order."""
        while self._launched and not _on_its_way(self._launched[0]):
            self._launched.popleft()
            over = True
        if over and not (self._inside or self._launched):
            self._report.together = False
            self.between()
        elif over:
            self._move()

    def _move(self, **changes: Any) -> None:
        self._write(moved=time.monotonic(), **changes)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            vars(self._report).update(changes)
            REPORT.write(self.memory, *vars(self._report).values())


def _on_its_way(array: Any) -> bool:
    try:
        return not array.is_ready()
    except RuntimeError:  # the array was donated to a later program
        return False
