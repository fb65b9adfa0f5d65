"""The journal of a rank: its steps, tasks, messages and signs of life, in memory that another process reads.

A rank that is stuck cannot say so itself. So it writes down what it begins, in memory that its watcher shares
(`fddp.runtime`); writing costs no system call. The last messages stay there too, and outlive the rank.

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

MESSAGES = 64  # number of last messages that are kept
WAIT_S = 0.01
BETWEEN = "between steps"
FINISHED = "finished"
FAILED = "failed"
LEFT = "left the world"  # this process goes on alone
ENDS = (FINISHED, FAILED, LEFT)  # a rank comes to one of these states, for good
STEP = "step"  # before the first task of a step, when it may compile
LAUNCHED = "launched"  # when the step is under way in XLA

# life          signs of life
# steps         steps begun
# calls         calls begun that all ranks make together: steps, and collectives of hosts
# messages      messages begun
# added         batches added without a message before the last such call
# added_before  the same before the call before that
# moved         when the rank last moved
# together      whether the rank is in a call of all ranks
# before        steps of the training before this process began
# then its pace, as in `Usual`
HEAD = struct.Struct("<QQQQQQd?qdddd")
HEADS = ("life", "steps", "calls", "messages", "added", "added_before", "moved", "together", "before", *Usual._fields)
TEXT = struct.Struct("<120s")  # what the rank does, what it sends, or where the main thread is, each at its place below
MESSAGE = struct.Struct("<QQddQ120s")  # number, step, begin, end, bytes, name
VERDICT = struct.Struct("<?512s")  # whether this rank is to end, and why
# The ranks agree at which question they stop, after one of them was told to end soon. The rank writes, behind the flag
# that it was told so: how often it has asked, the seconds between its last two questions, and the number of the
# question at which it agrees to stop, negative if it is past that one.
ANSWER = struct.Struct("<qdq")
# Its watcher writes the number of the question that is proposed, and whether all ranks have agreed to it.
PROPOSAL = struct.Struct("<q?")

# Places in the memory, in bytes.
DOING = 128
SENDING = 256
PLACE = 384
ENDING = 512
STOPPING = 1088
ANSWERED = STOPPING + 1
PROPOSED = ANSWERED + ANSWER.size
RING = 1280
SIZE = RING + MESSAGES * MESSAGE.size


class Verdict(NamedTuple):
    """The findings of the watchers of all ranks."""

    end: bool
    """Whether this rank is to end."""
    words: str
    """The reason, for a person."""


class Journal:
    """The record of what one process does; the groups that it is a member of share it."""

    def __init__(self, memory: Any = None, processes: int = 1) -> None:
        """Args:
        memory: `SIZE` bytes that can be written, shared with a watcher; None: nobody reads the journal.
        processes: number of processes of the job.
        """
        self.memory = bytearray(SIZE) if memory is None else memory
        self._read = memory is not None
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
        self.say(BETWEEN)

    def step(self, processes: int) -> AbstractContextManager[None]:
        """Notes a step, from its first task to its last.

        Args:
          processes: number of processes that take part in it.
        """
        self._steps += 1
        return self._of(STEP, processes, self._pace if processes == self.processes else self._other)

    def call(self, name: str, processes: int) -> AbstractContextManager[None]:
        """Notes a collective of hosts.

        Args:
          name: name of the collective.
          processes: number of processes that take part in it.
        """
        return self._of(name, processes, self._other)

    @contextmanager
    def message(self, name: str, nbytes: int) -> Iterator[None]:
        """Notes a message, from when it leaves until its sum is there; on any thread."""
        with self._lock:
            number = self._messages
            self._messages += 1
            start = time.monotonic()
            place = RING + number % MESSAGES * MESSAGE.size
            put(self.memory, place, MESSAGE.pack(number, self._steps, start, 0.0, nbytes, _short(name)))
            self._write(SENDING, name)
        yield
        with self._lock:
            put(self.memory, place + struct.calcsize("<QQd"), struct.pack("<d", time.monotonic()))
            self._write(SENDING, "")

    def computed(self, seconds: float) -> None:
        """Notes the seconds that the step under way has computed, where they are known."""
        self._computing = seconds

    def adds(self, processes: int) -> None:
        """Notes a batch that was added without a message.

        Args:
          processes: number of processes that will take part in the step that sends it.
        """
        self._adds += processes == self.processes

    def at(self, place: str) -> None:
        """Notes where in the script the main thread is; any thread may call it."""
        with self._lock:
            put(self.memory, PLACE, TEXT.pack(_short(place)))

    def goes_on(self, after: int) -> None:
        """Notes that this process continues a training that was saved.

        Args:
          after: the step after which it was saved.
        """
        self._before = after - self._steps
        self.say(BETWEEN)

    def launched(self, result: Any) -> None:
        """Notes the results of a step for which Python does not wait; the step is over when they are ready.

        Args:
          result: a tree of arrays, the last of which is watched.
        """
        if self._read:
            self._launched.append(jax.tree.leaves(result)[-1])
            self.say(LAUNCHED)

    def say(self, doing: str) -> None:
        """Notes what the main thread begins. Nothing replaces the note that this rank has come to its end.

        After it Python may call handlers at its exit, and the last steps may still be under way.
        """
        with self._lock:
            self._doing = self._doing if self._doing in ENDS else doing
            self._write(DOING, self._doing)

    def live(self) -> Verdict:
        """Notes that this process lives, and which of its steps are over.

        Returns:
          The watchers' verdict: whether it is to end.
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
        """Whether all ranks stop now: ranks that ask equally often get the same answer.

        The watchers propose a question that no rank has reached, as far as they know; it counts once all ranks have
        agreed. A rank that comes to the question waits for that. A rank that was already past it says so, and the
        watchers propose another.
        """
        now = time.monotonic()
        before = self._asked_at
        self._asked += 1
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
        """Reads what the watchers have found so far."""
        end, words = VERDICT.unpack_from(self.memory, ENDING)
        return Verdict(end, words.rstrip(b"\0").decode(errors="replace"))

    def _of(self, doing: str, processes: int, pace: Pace) -> AbstractContextManager[None]:
        return self._noted(doing, processes, pace) if self._read else nullcontext()

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
        put(self.memory, 0, HEAD.pack(*counts, time.monotonic(), self._together, self._before, *self._pace.usual))


def put(memory: Any, place: int, packed: bytes) -> None:
    """Writes into memory that another process reads meanwhile; `pack_into` would fill it with zeros first."""
    memory[place : place + len(packed)] = packed


def _on_its_way(array: Any) -> bool:
    try:
        return not array.is_ready()
    except RuntimeError:  # the array was donated to a later program
        return False


def _short(text: str) -> bytes:
    return text.encode(errors="replace")[: TEXT.size]
