"""Connections between the members of a job: lines of JSON over TCP, from proven members only.

Each connection has a thread that reads it. The end of a process closes its connections, which the
other members notice at once; a stopped process or a broken network is noticed by silence alone.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple

from fddp.comm import new_secret, signature, signed
from fddp.runtime import receive_line

MOST = 1 << 20  # bytes of a line
SEND_S = 2  # a member that reads nothing for this time is silent
PROOF_S = 5.0
RETRY_S = 0.2
LINES, COPIES = "lines", "copies"  # purposes of a connection


class Connection:
    """A connection to another member."""

    def __init__(self, uid: str, connection: socket.socket, lines: IO[bytes]) -> None:
        self.uid = uid
        self.ended = False
        """True once the other process has closed the connection, by its end."""
        self._connection = connection
        self._lines = lines
        self._sending = threading.Lock()

    def send(self, words: Mapping[str, Any]) -> None:
        """Sends a line; an error is left to the reading thread and to the limit of silence."""
        data = json.dumps(words).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._connection.sendall(data)

    def read(self, on_line: Callable[["Connection", Any], None]) -> None:
        """Reads lines until the connection ends."""
        try:
            while line := self._lines.readline(MOST):
                on_line(self, json.loads(line))
            self.ended = True
        except ConnectionResetError:
            self.ended = True
        except (OSError, ValueError):  # a broken network, or no JSON
            return

    def finish(self) -> None:
        """Ends the sending side; earlier lines still arrive, and the connection can be read."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class Handlers(NamedTuple):
    """Calls for the events of a connection, on the thread that reads it."""

    on_begin: Callable[[Connection], None]
    on_line: Callable[[Connection, Any], None]
    on_end: Callable[[Connection], None]
    on_copies: Callable[[str, socket.socket, IO[bytes]], None]
    """Reads a connection for copies, to its end."""


class Links:
    """All connections of a member, and the port at which it accepts others."""

    def __init__(self, uid: str, address: tuple[str, int], handlers: Handlers) -> None:
        """`address` is the host and port to listen at; port 0 takes any."""
        self._uid = uid
        self._handlers = handlers
        host, port = address
        self._door = socket.create_server((host, port), backlog=128)
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept, name="fddp-members", daemon=True).start()

    def connect(self, address: tuple[str, int], timeout_s: float) -> Connection:
        """Connects to a member, and begins to read its lines.

        Raises:
          ConnectionError: no member of this job answers there in time.
        """
        return self._begin(*self.call(address, timeout_s, LINES))

    def call(
        self, address: tuple[str, int], timeout_s: float, purpose: str
    ) -> tuple[str, socket.socket, IO[bytes]]:
        """Connects to a member for a purpose; returns its uid and the connection."""
        try:
            connection = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise ConnectionError(f"no member of this job answers at {address}.") from error
        try:
            lines = connection.makefile("rb")
            challenge = lines.readline(MOST).decode().strip()
            answer = new_secret()
            proof = signature(purpose, challenge, answer, self._uid)
            words = [purpose, self._uid, answer, proof]
            connection.sendall(json.dumps(words).encode() + b"\n")
            uid, proof = json.loads(lines.readline(MOST))
            if not signed(proof, purpose, answer, challenge, uid):
                raise ConnectionError("the process there is not of this job.")
        except (OSError, ValueError, TypeError) as error:
            connection.close()
            raise ConnectionError(f"no member of this job answers at {address}.") from error
        return str(uid), connection, lines

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:  # the limit of open files
                time.sleep(RETRY_S)
                continue
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        """Challenges a caller; a stranger is dropped."""
        challenge = new_secret()
        try:
            connection.settimeout(PROOF_S)
            connection.sendall(challenge.encode() + b"\n")
            line = receive_line(connection, time.monotonic() + PROOF_S)
            purpose, uid, answer, proof = map(str, json.loads(line))
            if not signed(proof, purpose, challenge, answer, uid):
                raise ConnectionError
            proof = signature(purpose, answer, challenge, self._uid)
            connection.sendall(json.dumps([self._uid, proof]).encode() + b"\n")
        except (OSError, ValueError, TypeError):
            connection.close()
            return
        lines = connection.makefile("rb")
        if purpose == LINES:
            self._begin(uid, connection, lines)
        else:
            self._handlers.on_copies(uid, connection, lines)

    def _begin(self, uid: str, connection: socket.socket, lines: IO[bytes]) -> Connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        limit = struct.pack("ll", SEND_S, 0)  # seconds, microseconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        link = Connection(uid, connection, lines)
        self._handlers.on_begin(link)
        threading.Thread(target=self._read, args=(link,), name="fddp-member", daemon=True).start()
        return link

    def _read(self, link: Connection) -> None:
        link.read(self._handlers.on_line)
        self._handlers.on_end(link)
