"""The parameter server, which merges the pseudo-gradients of islands.

It runs in a process that rank 0 starts, and is no rank itself. A slow or stopped island, even rank
0's, blocks no other island. The server ends with the process of rank 0, or after the last island
has left.

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
from typing import Any, NamedTuple

import jax

from fddp.comm import new_secret, signed
from fddp.islands.merge_log import Line, Meeting, Merged, serialize
from fddp.islands.merging import Contribution, Merging, SharedParams, merge
from fddp.islands.protocol import hear, hear_arrays, send_frame
from fddp.islands.quorum import Arrival, Quorum, due_at
from fddp.jax_internals import unpacked

HELLO_S = 10.0  # limit for a client to prove that it has the token
BEAT_S = 0.5  # interval of messages to waiting clients


class ServerConfig(NamedTuple):
    """The server's configuration."""

    rule: Quorum
    """Without its `discount`, which is part of the programs."""
    islands: int
    shared: SharedParams
    add: bytes
    """The programs of `Merging`, compiled."""
    step: bytes
    token: str
    """Secret of the clients."""
    bind: str
    """Address to listen at."""
    x64: bool


def main() -> None:
    """Reads the job from stdin, writes the port to stdout, and serves until all islands leave."""
    job: ServerConfig = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_enable_x64", job.x64)
    server = _Server(job)
    listener = socket.create_server((job.bind, 0), backlog=job.islands)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    threading.Thread(target=server.let_in, args=(listener,), daemon=True).start()
    server.merges()


def _end_with_rank_0() -> None:
    """Ends this process when stdin closes: rank 0 holds its other end while it lives."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


class _Server:
    """The shared parameters and the pending contributions, under one lock."""

    def __init__(self, job: ServerConfig) -> None:
        self.job = job
        self.shared = job.shared
        self.merging = Merging(unpacked(job.add), unpacked(job.step))
        # Version from which each active island trains.
        self.began = dict.fromkeys(range(job.islands), job.shared.version)
        # Time and contribution of each island that waits for its merge.
        self.came: dict[int, tuple[float, Contribution]] = {}
        self.meeting = set[int]()
        self.met = job.shared  # shared parameters of the last meeting
        self.meetings = 0
        self.failed = ""
        self.turn = threading.Condition()

    def merges(self) -> None:
        """Merges each complete quorum, until all islands have left."""
        try:
            while contributions := self._quorum():
                # Without the lock, so that waiting clients get their beats meanwhile.
                newest = merge(self.merging, self.shared, contributions)
                self._merged(newest, contributions)
        except Exception:
            with self.turn:
                self.failed = traceback.format_exc()
                self.turn.notify_all()
            time.sleep(2 * BEAT_S)  # time to report it to all waiting clients
            sys.exit(self.failed)

    def _quorum(self) -> list[Contribution]:
        """Waits for a quorum, and returns its contributions; none after all islands have left."""
        with self.turn:
            while self.began or self.meeting or self.came:
                if self.meeting and not (self.began or self.came):
                    self._meets()
                    continue
                arrivals = [Arrival(island, at) for island, (at, _) in self.came.items()]
                due = due_at(self.job.rule, self.shared.version, self.began, arrivals)
                timeout = None if due is None else due - time.monotonic()
                if timeout is not None and timeout <= 0:
                    return [self.came[island][1] for island in sorted(self.came)]
                self.turn.wait(timeout)
        return []

    def _meets(self) -> None:
        self.began = dict.fromkeys(self.meeting, self.shared.version)
        self.meeting = set()
        self.met = self.shared
        self.meetings += 1
        self._note(Meeting(self.shared.version))

    def _merged(self, newest: SharedParams, contributions: list[Contribution]) -> None:
        with self.turn:
            self.shared = newest
            for contribution in contributions:
                del self.came[contribution.island]
                if contribution.island in self.began:
                    self.began[contribution.island] = newest.version
            islands, began, weights, steps, _ = zip(*contributions)
            self._note(Merged(newest.version, islands, began, weights, steps))

    def _note(self, line: Line) -> None:
        if self.job.rule.log:
            with Path(self.job.rule.log).open("a") as log:
                log.write(serialize(line) + "\n")
        self.turn.notify_all()

    def let_in(self, listener: socket.socket) -> None:
        """Accepts connections, with a thread for each."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the peer hung up, or this process is out of file descriptors
                time.sleep(BEAT_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        island = None
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(HELLO_S)
                send_frame(connection, {"challenge": (challenge := new_secret())})
                hello = hear(connection, time.monotonic() + HELLO_S)
                if not signed(hello.get("proof"), self.job.token, challenge):
                    return
                connection.settimeout(None)
                island = int(hello["island"])
                while True:
                    request = hear(connection)
                    newest = self._wait(
                        island, connection, self._heard(island, connection, request)
                    )
                    outer = newest.outer if "meets" in request else ()
                    send_frame(connection, {"version": newest.version}, [*newest.params, *outer])
        except (OSError, ValueError):
            pass  # the client has left; the watchers detect whether it died
        finally:
            if island is not None:
                self._leaves(island)

    def _heard(
        self, island: int, connection: socket.socket, request: dict[str, Any]
    ) -> Callable[[], SharedParams | None]:
        """Records a request, and returns a function for the reply, or None while it is pending."""
        if "meets" in request:
            with self.turn:
                before = self.meetings
                self.began.pop(island, None)
                self.meeting.add(island)
                self.turn.notify_all()
            return lambda: self.met if self.meetings > before else None
        change = hear_arrays(connection, self.job.shared.params)
        with self.turn:
            contribution = Contribution(
                island, request["began"], request["weight"], request["step"], change
            )
            self.came[island] = time.monotonic(), contribution
            self.turn.notify_all()
        return lambda: None if island in self.came else self.shared

    def _wait(
        self, island: int, connection: socket.socket, reply: Callable[[], SharedParams | None]
    ) -> SharedParams:
        while True:
            with self.turn:
                self.turn.wait_for(lambda: reply() or self.failed, BEAT_S)
                if (newest := reply()) and not self.failed:
                    self.began[island] = newest.version
                    return newest
            if self.failed:
                send_frame(connection, {"fails": self.failed})
                raise ConnectionAbortedError
            send_frame(connection, {"waits": True})

    def _leaves(self, island: int) -> None:
        with self.turn:
            self.began.pop(island, None)
            self.meeting.discard(island)
            self.turn.notify_all()
