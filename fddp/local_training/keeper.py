"""The keeper of the shared parameters: a process beside rank 0, which merges what islands send.

It is no rank. An island that is slow or stopped, rank 0 too, keeps nobody from it. It ends with rank 0's process, and
when the last island has left.

Source: parameter servers (Li et al., OSDI 2014); the syncer of Decoupled DiLoCo (arXiv 2604.21428).
"""

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.comm import new_secret, signed
from fddp.jax_internals import unpacked
from fddp.local_training.frames import hear, hear_arrays, tell
from fddp.local_training.merge_log import Line, Meeting, Merged, written
from fddp.local_training.merging import Contribution, Merging, SharedParams, merge
from fddp.optim import Arrival, Quorum, due_at

HELLO_S = 10.0  # in which an island proves that it knows the token
BEAT_S = 0.5  # an island that waits hears so often that the keeper lives


class Job(NamedTuple):
    """All that the keeper is told at its start."""

    rule: Quorum
    """Without its `discount`, which is part of the programs."""
    islands: int
    shared: SharedParams
    add: bytes
    """The programs of `Merging`, compiled."""
    step: bytes
    token: str
    """Only those who know it are heard."""
    bind: str
    """The address at which it listens."""
    x64: bool


def main() -> None:
    """Runs the keeper: reads its job from stdin, writes its port to stdout, and serves until all have left."""
    job: Job = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_enable_x64", job.x64)
    keeper = _Keeper(job)
    listener = socket.create_server((job.bind, 0), backlog=job.islands)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    threading.Thread(target=keeper.let_in, args=(listener,), daemon=True).start()
    keeper.merges()


def _end_with_rank_0() -> None:
    """Ends this process when nobody holds the other end of its stdin any more, as rank 0 does while it lives."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


class _Keeper:
    """The shared parameters, and the islands' contributions that wait; all of it under one lock."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shared = job.shared
        self.merging = Merging(unpacked(job.add), unpacked(job.step))
        self.began = dict.fromkeys(range(job.islands), job.shared.version)  # of islands that take part
        self.came: dict[int, tuple[float, Contribution]] = {}
        self.meeting = set[int]()
        self.met = job.shared  # the shared parameters of the last meeting
        self.meetings = 0
        self.failed = ""
        self.turn = threading.Condition()

    def merges(self) -> None:
        """Merges whenever a quorum is there, until all islands have left."""
        try:
            while chosen := self._quorum():
                # Not under the lock: those who wait hear meanwhile that the keeper lives.
                newest = merge(self.merging, self.shared, chosen)
                self._merged(newest, chosen)
        except Exception:
            with self.turn:
                self.failed = traceback.format_exc()
                self.turn.notify_all()
            time.sleep(2 * BEAT_S)  # until those who wait have heard of it
            sys.exit(self.failed)

    def _quorum(self) -> list[Contribution]:
        """Waits for a quorum, and returns what it has sent; nothing when all islands have left."""
        with self.turn:
            while self.began or self.meeting or self.came:
                if self.meeting and not (self.began or self.came):
                    self._meets()
                    continue
                arrivals = [Arrival(island, at) for island, (at, _) in self.came.items()]
                due = due_at(self.job.rule, self.shared.version, self.began, arrivals)
                left = None if due is None else due - time.monotonic()
                if left is not None and left <= 0:
                    return [self.came[island][1] for island in sorted(self.came)]
                self.turn.wait(left)
        return []

    def _meets(self) -> None:
        self.began = dict.fromkeys(self.meeting, self.shared.version)
        self.meeting = set()
        self.met = self.shared
        self.meetings += 1
        self._note(Meeting(self.shared.version))

    def _merged(self, newest: SharedParams, merged: list[Contribution]) -> None:
        with self.turn:
            self.shared = newest
            for one in merged:
                del self.came[one.island]
                if one.island in self.began:
                    self.began[one.island] = newest.version
            islands, began, weights, steps, _ = zip(*merged)
            self._note(Merged(newest.version, islands, began, weights, steps))

    def _note(self, line: Line) -> None:
        if self.job.rule.log:
            with Path(self.job.rule.log).open("a") as log:
                log.write(written(line) + "\n")
        self.turn.notify_all()

    def let_in(self, listener: socket.socket) -> None:
        """Lets islands in, and whoever else calls out again."""
        while True:
            try:
                door, _ = listener.accept()
            except OSError:  # it has left again, or this process may open no more files for a while
                time.sleep(BEAT_S)
                continue
            threading.Thread(target=self._serve, args=(door,), daemon=True).start()

    def _serve(self, door: socket.socket) -> None:
        island = None
        try:
            with door:
                door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                door.settimeout(HELLO_S)
                tell(door, {"challenge": (challenge := new_secret())})
                hello = hear(door, time.monotonic() + HELLO_S)
                if not signed(hello.get("proof"), self.job.token, challenge):
                    return
                door.settimeout(None)
                island = int(hello["island"])
                while True:
                    line = hear(door)
                    newest = self._wait(island, door, self._heard(island, door, line))
                    outer = newest.outer if "meets" in line else ()
                    tell(door, {"version": newest.version}, [*newest.params, *outer])
        except (OSError, ValueError):
            pass  # it has left; the watchers know whether it died
        finally:
            if island is not None:
                self._leaves(island)

    def _heard(self, island: int, door: socket.socket, line: dict) -> Callable[[], SharedParams | None]:
        """Notes what an island says; returns a function that returns the answer, or None while it is not there."""
        if "meets" in line:
            with self.turn:
                before = self.meetings
                self.began.pop(island, None)
                self.meeting.add(island)
                self.turn.notify_all()
            return lambda: self.met if self.meetings > before else None
        change = hear_arrays(door, self.job.shared.params)
        with self.turn:
            given = Contribution(island, line["began"], line["weight"], line["step"], change)
            self.came[island] = time.monotonic(), given
            self.turn.notify_all()
        return lambda: None if island in self.came else self.shared

    def _wait(self, island: int, door: socket.socket, answer: Callable[[], SharedParams | None]) -> SharedParams:
        while True:
            with self.turn:
                self.turn.wait_for(lambda: answer() or self.failed, BEAT_S)
                if (newest := answer()) and not self.failed:
                    self.began[island] = newest.version
                    return newest
            if self.failed:
                tell(door, {"fails": self.failed})
                raise ConnectionAbortedError
            tell(door, {"waits": True})

    def _leaves(self, island: int) -> None:
        with self.turn:
            self.began.pop(island, None)
            self.meeting.discard(island)
            self.turn.notify_all()
