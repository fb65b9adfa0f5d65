"""What this rank is doing, written where another process can read it: steps, tasks, messages, and signs of life.

A rank that is stuck cannot say so itself. So it writes down what it begins, in memory that its watcher shares
(`fddp.runtime`), and writing costs no system call. The last messages stay there too, and outlive the rank.

Source: the flight recorder of PyTorch's NCCL process group.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax

from fddp.comm.pace import Pace, Usual

MESSAGES = 64  # that are kept
WAIT_S = 0.01
BETWEEN, FINISHED, FAILED = "between steps", "finished", "failed"
ENDS = (FINISHED, FAILED)  # a script comes to one of them, for good
STEP, LAUNCHED = "step", "launched"  # before the first task of a step, when it may compile; and when it is XLA's

# Signs of life; steps begun; calls begun that all ranks make together, steps and what hosts say to each other; messages
# begun; batches added without a message before the last such call, and before the one before it; when the rank last
# moved; whether it is in a call of all ranks; steps of the training before this process began; and its pace.
HEAD = struct.Struct("<QQQQQQd?qdddd")
HEADS = ("life", "steps", "calls", "messages", "added", "added_before", "moved", "together", "before", *Usual._fields)
TEXT = struct.Struct("<120s")  # what it does, what it sends, and where the main thread is
MESSAGE = struct.Struct("<QQddQ120s")  # number, step, begin, end, bytes, name
VERDICT = struct.Struct("<?512s")  # whether this rank is to end, and why
# What ranks agree on when one was told to end soon. This one writes whether it was, how often it has asked, the seconds
# between, and the question that it agrees to, negative if it has passed that; its watcher writes the question that is
# proposed, and whether all have agreed.
ANSWER, PROPOSAL = struct.Struct("<qdq"), struct.Struct("<q?")

DOING, SENDING, PLACE, ENDING, STOPPING, RING = 128, 256, 384, 512, 1088, 1280
ANSWERED, PROPOSED = STOPPING + 1, STOPPING + 1 + ANSWER.size
SIZE = RING + MESSAGES * MESSAGE.size


class Verdict(NamedTuple):
    """What the watchers of all ranks have found."""

    end: bool
    """Whether this rank is to end."""
    words: str


class Journal:
    """What one process does; the groups that it is a member of share it."""

    def __init__(self, memory: Any = None, processes: int = 1) -> None:
        """Args:
        memory: `SIZE` bytes that can be written, shared with a watcher; None: nobody reads what this process does.
        processes: of the job.
        """
        self.memory, self._read = bytearray(SIZE) if memory is None else memory, memory is not None
        self.processes = processes
        self._lock, self._launched = threading.RLock(), deque[Any]()
        self._pace, self._other, self._computing = Pace(), Pace(), 0.0  # of steps of all ranks, and of all else
        self._life = self._steps = self._calls = self._messages = self._before = 0
        self._adds, self._added = 0, (0, 0)
        self._inside = self._together = False
        self._doing = BETWEEN
        self._asked, self._asked_at = 0, time.monotonic()
        self.say(BETWEEN)

    def step(self, processes: int) -> AbstractContextManager[None]:
        """Notes a step, from its first task to its last.

        Args:
          processes: how many take part in it.
        """
        self._steps += 1
        return self._of(STEP, processes, self._pace if processes == self.processes else self._other)

    def call(self, name: str, processes: int) -> AbstractContextManager[None]:
        """Notes what hosts say to each other.

        Args:
          name: what they do.
          processes: how many take part in it.
        """
        return self._of(name, processes, self._other)

    @contextmanager
    def message(self, name: str, nbytes: int) -> Iterator[None]:
        """Notes a message, from when it leaves until its sum is there; on any thread."""
        with self._lock:
            number, self._messages, start = self._messages, self._messages + 1, time.monotonic()
            place = RING + number % MESSAGES * MESSAGE.size
            put(self.memory, place, MESSAGE.pack(number, self._steps, start, 0.0, nbytes, _short(name)))
            self._write(SENDING, name)
        yield
        with self._lock:
            put(self.memory, place + struct.calcsize("<QQd"), struct.pack("<d", time.monotonic()))
            self._write(SENDING, "")

    def computed(self, seconds: float) -> None:
        """Notes how long the step that is under way has computed, where that is known."""
        self._computing = seconds

    def adds(self, processes: int) -> None:
        """Notes a batch that was added without a message.

        Args:
          processes: how many will take part in the step that sends it.
        """
        self._adds += processes == self.processes

    def at(self, place: str) -> None:
        """Notes where in the script the main thread is; any thread may tell."""
        with self._lock:
            put(self.memory, PLACE, TEXT.pack(_short(place)))

    def goes_on(self, after: int) -> None:
        """Notes that this process goes on with a training.

        Args:
          after: the step after which it was saved.
        """
        self._before = after - self._steps
        self.say(BETWEEN)

    def launched(self, result: Any) -> None:
        """Notes what a step will have made when it is over, if Python does not wait for it.

        Args:
          result: a tree of arrays, the last of which is watched.
        """
        if self._read:
            self._launched.append(jax.tree.leaves(result)[-1])
            self.say(LAUNCHED)

    def say(self, doing: str) -> None:
        """Notes what the main thread begins; once the script has ended, that it did stays.

        Python calls handlers at its exit after that, and the last steps may still be under way.
        """
        with self._lock:
            self._doing = self._doing if self._doing in ENDS else doing
            self._write(DOING, self._doing)

    def live(self) -> Verdict:
        """Notes that this process lives, and which of its steps are over.

        Returns:
          What is to become of it.
        """
        with self._lock:
            self._life += 1
            put(self.memory, 0, struct.pack("<Q", self._life))
            self._look()
        return self.verdict()

    def ask_to_stop(self) -> None:
        """Notes that this process is to end soon; the handler of a signal may call it."""
        put(self.memory, STOPPING, struct.pack("<?", True))

    def stops(self) -> bool:
        """Whether all ranks stop now: the same on all that ask equally often.

        A question is proposed that no rank has reached, as far as the watchers know, and counts once all have agreed.
        Who has come to it waits for that; who was already past it says so, and another is proposed.
        """
        now, self._asked, before = time.monotonic(), self._asked + 1, self._asked_at
        self._asked_at = now
        while True:
            proposed, settled = PROPOSAL.unpack_from(self.memory, PROPOSED)
            if self.processes == 1:
                return bool(self.memory[STOPPING])
            agreed = proposed if self._asked <= proposed else -proposed
            put(self.memory, ANSWERED, ANSWER.pack(self._asked, now - before, agreed))
            if self._asked != proposed or settled:
                return self._asked == proposed
            time.sleep(WAIT_S)

    def verdict(self) -> Verdict:
        """What the watchers have found so far."""
        end, words = VERDICT.unpack_from(self.memory, ENDING)
        return Verdict(end, words.rstrip(b"\0").decode(errors="replace"))

    def _of(self, doing: str, processes: int, pace: Pace) -> AbstractContextManager[None]:
        return self._noted(doing, processes, pace) if self._read else nullcontext()

    @contextmanager
    def _noted(self, doing: str, processes: int, pace: Pace) -> Iterator[None]:
        before, self._inside, self._together = self._added, True, processes == self.processes
        self._calls += self._together
        self._added = (self._adds, self._added[0]) if self._together else self._added
        self._computing = 0.0
        pace.begin(time.monotonic())
        self.say(LAUNCHED if self._launched else doing)
        try:
            yield
        except BaseException:
            # The others did not see it, or failed as well.
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
        """Steps that were launched end one after the other, and Python may be many ahead of them."""
        while self._launched and not _on_its_way(self._launched[0]):
            self._launched.popleft()
            over = True
        if over and not (self._inside or self._launched):
            self._together = False
            self.say(BETWEEN)
        elif over:
            self._write_head()

    def _write(self, place: int, text: str) -> None:
        if self._read:
            put(self.memory, place, TEXT.pack(_short(text)))
            self._write_head()

    def _write_head(self) -> None:
        if not self._read:
            return
        counts = (self._life, self._steps, self._calls, self._messages, *self._added)
        pace, now = self._pace.usual, time.monotonic()
        put(self.memory, 0, HEAD.pack(*counts, now, self._together, self._before, *pace))


def put(memory: Any, place: int, packed: bytes) -> None:
    """Writes into memory that another process reads meanwhile: `pack_into` would fill it with zeros first."""
    memory[place : place + len(packed)] = packed


def _on_its_way(array: Any) -> bool:
    try:
        return not array.is_ready()
    except RuntimeError:  # a later program has used its memory up
        return False


def _short(text: str) -> bytes:
    return text.encode(errors="replace")[: TEXT.size]
