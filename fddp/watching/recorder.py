"""The recorder of a rank: writes down its steps, tasks, messages and signs of life, in memory that its watcher reads.

A rank that is stuck cannot say so itself. So it writes down what it begins, in memory that another process shares;
writing costs no system call. The last messages stay there too, and outlive the rank.

Source: the flight recorder of PyTorch's NCCL process group.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from fddp.comm import Finding, Journal
from fddp.watching.pace import Pace
from fddp.watching.watcher.shared_memory import (
    ANSWER,
    BETWEEN,
    DOING,
    ENDS,
    HEAD,
    LAUNCHED,
    LIFE,
    PLACE,
    PROPOSAL,
    SENDING,
    STEP,
    TOLD,
    VERDICT,
    Record,
    message,
)

WAIT_S = 0.01


class Recorder:
    """Writes down what one process does, for its watcher."""

    def __init__(self, memory: Any, processes: int = 1) -> None:
        """Args:
        memory: `SIZE` bytes that can be written, as `watcher/shared_memory.py` divides them.
        processes: number of processes of the job.
        """
        self.memory = memory
        self.processes = processes
        self._lock = threading.RLock()
        self._launched = deque[Any]()
        self._pace = Pace()  # of steps of all ranks
        self._other = Pace()  # of all else
        self._computing = 0.0
        self._life = self._steps = self._calls = self._messages = self._before = 0
        self._adds = 0
        self._added = (0, 0)
        self._inside = self._together = False
        self._doing = BETWEEN
        self._asked = 0
        self._asked_at = time.monotonic()
        self.between()

    def journal(self) -> Journal:
        """The functions by which groups tell it what this process does."""
        return Journal(
            step=self.step,
            call=self.call,
            message=self.message,
            say=self.say,
            between=self.between,
            computed=self.computed,
            launched=self.launched,
            adds=self.adds,
            goes_on=self.goes_on,
            finding=self.finding,
            ask_to_stop=self.ask_to_stop,
            stops=self.stops,
        )

    def step(self, processes: int) -> AbstractContextManager[None]:
        """Notes a step of so many processes, from its first task to its last."""
        self._steps += 1
        return self._noted(STEP, processes, self._pace if processes == self.processes else self._other)

    def call(self, name: str, processes: int) -> AbstractContextManager[None]:
        """Notes a collective of the hosts of so many processes."""
        return self._noted(name, processes, self._other)

    @contextmanager
    def message(self, name: str, nbytes: int) -> Iterator[None]:
        """Notes a message, from when it leaves until its sum is there; on any thread."""
        with self._lock:
            record = message(self._messages)
            begun = (self._messages, self._steps, time.monotonic())
            self._messages += 1
            record.write(self.memory, *begun, 0.0, nbytes, name)
            self._write(SENDING, name)
        yield
        with self._lock:
            record.write(self.memory, *begun, time.monotonic(), nbytes, name)
            self._write(SENDING, "")

    def computed(self, seconds: float) -> None:
        """Notes the seconds that the step under way has computed, where they are known."""
        self._computing = seconds

    def adds(self, processes: int) -> None:
        """Notes a batch that was added without a message, for a step of so many processes."""
        self._adds += processes == self.processes

    def at(self, place: str) -> None:
        """Notes where in the script the main thread is; any thread may call it."""
        with self._lock:
            PLACE.write(self.memory, place)

    def goes_on(self, after: int) -> None:
        """Notes that this process continues a training that was saved after a step."""
        self._before = after - self._steps
        self.between()

    def launched(self, result: Any) -> None:
        """Notes the results of a step for which Python does not wait: the step is over when the last one is ready."""
        self._launched.append(jax.tree.leaves(result)[-1])
        self.say(LAUNCHED)

    def say(self, doing: str) -> None:
        """Notes what the main thread begins. Nothing replaces the note that this rank has come to its end.

        After it Python may call handlers at its exit, and the last steps may still be under way.
        """
        with self._lock:
            self._doing = self._doing if self._doing in ENDS else doing
            self._write(DOING, self._doing)

    def between(self) -> None:
        """Notes that the main thread is between two steps, and makes progress."""
        self.say(BETWEEN)

    def live(self) -> Finding:
        """Notes that this process lives, and which of its steps are over; returns what the watchers have found."""
        with self._lock:
            self._life += 1
            LIFE.write(self.memory, self._life)
            self._look()
        return self.finding()

    def ask_to_stop(self) -> None:
        """Notes that this process is to end soon; the handler of a signal may call it."""
        TOLD.write(self.memory, True)

    def stops(self) -> bool:
        """Whether all ranks stop now: ranks that ask equally often get the same answer.

        The watchers propose a question that no rank has reached, as far as they know; it counts once all ranks have
        agreed. A rank that comes to the question waits for that. A rank that was already past it says so, and the
        watchers propose another.
        """
        now = time.monotonic()
        before = self._asked_at
        self._asked += 1
        self._asked_at = now
        if self.processes == 1:
            return TOLD.read(self.memory)["told"]
        while True:
            proposal = PROPOSAL.read(self.memory)
            proposed = proposal["step"]
            agreed = proposed if self._asked <= proposed else -proposed
            ANSWER.write(self.memory, self._asked, now - before, agreed)
            if self._asked != proposed or proposal["settled"]:
                return self._asked == proposed
            time.sleep(WAIT_S)

    def finding(self) -> Finding:
        """Reads what the watchers have found so far."""
        return Finding(**VERDICT.read(self.memory))

    @contextmanager
    def _noted(self, doing: str, processes: int, pace: Pace) -> Iterator[None]:
        before = self._added
        self._inside = True
        self._together = processes == self.processes
        self._calls += self._together
        self._added = (self._adds, self._added[0]) if self._together else self._added
        self._computing = 0.0
        pace.begin(time.monotonic())
        self.say(LAUNCHED if self._launched else doing)
        try:
            yield
        except BaseException:
            # The other ranks did not begin this call, or failed in it as well.
            self._calls -= self._together
            self._steps -= doing == STEP
            self._added = before
            raise
        finally:
            with self._lock:
                self._inside = False
                self._look(over=True)
        pace.end(time.monotonic(), self._computing, hidden=bool(self._launched))

    def _look(self, over: bool = False) -> None:
        """Takes note of launched steps that are over: they end one after the other, and Python may be many ahead."""
        while self._launched and not _on_its_way(self._launched[0]):
            self._launched.popleft()
            over = True
        if over and not (self._inside or self._launched):
            self._together = False
            self.between()
        elif over:
            self._write_head()

    def _write(self, record: Record, text: str) -> None:
        record.write(self.memory, text)
        self._write_head()

    def _write_head(self) -> None:
        counts = (self._steps, self._calls, self._messages, *self._added)
        HEAD.write(self.memory, *counts, time.monotonic(), self._together, self._before, *self._pace.usual)


def _on_its_way(array: Any) -> bool:
    try:
        return not array.is_ready()
    except RuntimeError:  # the array was donated to a later program
        return False
