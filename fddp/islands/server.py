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
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.comm import new_secret, signed
from fddp.islands.merge_log import Line, Meeting, Merged, serialize
from fddp.islands.merging import Contribution, Merging, SharedParams, merge
from fddp.islands.protocol import receive_arrays, receive_header, send_message
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
    """Reads the configuration from stdin, writes the port to stdout, and serves all islands."""
    config: ServerConfig = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_enable_x64", config.x64)
    server = _Server(config)
    listener = socket.create_server((config.bind, 0), backlog=config.islands)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    threading.Thread(target=server.accept, args=(listener,), daemon=True).start()
    server.merge_all()


def _end_with_rank_0() -> None:
    """Ends this process when stdin closes: rank 0 holds its other end while it lives."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


class _Server:
    """The shared parameters and the pending contributions, under one lock."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.shared = config.shared
        self.merging = Merging(unpacked(config.add), unpacked(config.step))
        # Version from which each active island trains.
        self.began = dict.fromkeys(range(config.islands), config.shared.version)
        # Time and contribution of each island that waits for its merge.
        self.pending: dict[int, tuple[float, Contribution]] = {}
        self.meeting = set[int]()
        self.replies: dict[int, SharedParams] = {}
        self.failure = ""
        self.changed = threading.Condition()

    def merge_all(self) -> None:
        """Merges each complete quorum, until all islands have left."""
        try:
            while contributions := self._quorum():
                # Without the lock, so that waiting clients get their heartbeats meanwhile.
                newest = merge(self.merging, self.shared, contributions)
                with self.changed:
                    self._publish(newest, contributions)
        except Exception:
            with self.changed:
                self.failure = traceback.format_exc()
                self.changed.notify_all()
            time.sleep(2 * BEAT_S)  # time to report it to all waiting clients
            sys.exit(self.failure)

    def _quorum(self) -> list[Contribution]:
        """Waits for a quorum, and returns its contributions; none after all islands have left."""
        with self.changed:
            while self.began or self.meeting or self.pending:
                if self.meeting and not (self.began or self.pending):
                    self._end_meeting()
                    continue
                arrivals = [Arrival(island, at) for island, (at, _) in self.pending.items()]
                due = due_at(self.config.rule, self.shared.version, self.began, arrivals)
                timeout = None
                if due is not None:
                    timeout = due - time.monotonic()
                    if timeout <= 0:
                        return [self.pending[island][1] for island in sorted(self.pending)]
                self.changed.wait(timeout)
        return []

    def _end_meeting(self) -> None:
        self.began = dict.fromkeys(self.meeting, self.shared.version)
        self.replies |= dict.fromkeys(self.meeting, self.shared)
        self.meeting = set()
        self._log(Meeting(self.shared.version))

    def _publish(self, newest: SharedParams, contributions: list[Contribution]) -> None:
        self.shared = newest
        for contribution in contributions:
            island = contribution.island
            del self.pending[island]
            self.replies[island] = newest
            if island in self.began:
                self.began[island] = newest.version
        islands, began, weights, steps, _ = zip(*contributions)
        self._log(Merged(newest.version, islands, began, weights, steps))

    def _log(self, line: Line) -> None:
        if self.config.rule.log:
            with Path(self.config.rule.log).open("a") as log:
                log.write(serialize(line) + "\n")
        self.changed.notify_all()

    def accept(self, listener: socket.socket) -> None:
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
                send_message(connection, {"challenge": (challenge := new_secret())})
                hello = receive_header(connection, time.monotonic() + HELLO_S)
                if not signed(hello.get("proof"), self.config.token, challenge):
                    return
                connection.settimeout(None)
                island = int(hello["island"])
                while True:
                    self._answer(island, connection)
        except (OSError, ValueError):
            pass  # the client has left; the watchers detect whether it died
        finally:
            if island is not None:
                with self.changed:
                    self.began.pop(island, None)
                    self.meeting.discard(island)
                    self.changed.notify_all()

    def _answer(self, island: int, connection: socket.socket) -> None:
        """Answers one request, with heartbeats until the reply is ready."""
        request = receive_header(connection)
        meets = "meets" in request
        change = [] if meets else receive_arrays(connection, self.config.shared.params)
        with self.changed:
            if meets:
                self.began.pop(island, None)
                self.meeting.add(island)
            else:
                began, weight, step = (request[name] for name in ("began", "weight", "step"))
                contribution = Contribution(island, began, weight, step, change)
                self.pending[island] = time.monotonic(), contribution
            self.changed.notify_all()
        while (newest := self._reply(island)) is None:
            if self.failure:
                send_message(connection, {"fails": self.failure})
                raise ConnectionAbortedError
            send_message(connection, {"waits": True})
        outer = newest.outer if meets else ()
        send_message(connection, {"version": newest.version}, [*newest.params, *outer])

    def _reply(self, island: int) -> SharedParams | None:
        """Waits for the reply to an island for the time of a heartbeat."""
        with self.changed:
            self.changed.wait_for(lambda: island in self.replies or self.failure, BEAT_S)
            return self.replies.pop(island, None)
