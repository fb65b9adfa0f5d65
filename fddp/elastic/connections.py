"""Connections between the members of a job: lines of JSON over TCP, from proven members only.

Each connection has a thread that reads it. The end of a process closes its connections, which the
other members notice at once; a stopped process or a broken network is noticed by silence alone.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fddp.comm import answer_calls, call
from fddp.runtime import place_of

MOST = 1 << 20  # bytes of a line
SEND_S = 2  # a member that reads nothing for this time is silent
TOPIC = "members"
CONNECT_S = 2.0
RETRY_S = 0.2


class Connection:
    """A connection to another member."""

    def __init__(self, uid: str, connection: socket.socket) -> None:
        self.uid = uid
        self.ended = False
        """True once the other process has closed the connection, by its end."""
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, words: Mapping[str, Any]) -> None:
        """Sends a line; an error is left to the reading thread and to the limit of silence."""
        data = json.dumps(words).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._connection.sendall(data)

    def read(self, on_line: Callable[["Connection", Any], object]) -> None:
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


class Links:
    """All connections of a member, and the port at which it accepts others."""

    def __init__(
        self,
        uid: str,
        address: tuple[str, int],
        on_begin: Callable[[Connection], object],
        on_line: Callable[[Connection, Any], object],
        on_end: Callable[[Connection], object],
    ) -> None:
        """Listens at `address`, host and port; port 0 takes any.

        The calls for the events of a connection are on the thread that reads it.
        """
        self._uid = uid
        self._on_begin, self._on_line, self._on_end = on_begin, on_line, on_end
        self._door = socket.create_server(address, backlog=128)
        self.port = int(self._door.getsockname()[1])
        answer_calls(self._door, TOPIC, uid, self._begin)

    def connect(self, address: str) -> Connection:
        """Connects to a member, and begins to read its lines; ConnectionError if none answers."""
        try:
            uid, connection = call(place_of(address), TOPIC, self._uid, CONNECT_S)
        except OSError as error:
            raise ConnectionError(f"no member of this job answers at {address}.") from error
        return self._begin(uid, connection)

    def _begin(self, uid: str, connection: socket.socket) -> Connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        limit = struct.pack("ll", SEND_S, 0)  # seconds, microseconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        link = Connection(uid, connection)
        self._on_begin(link)

        def read() -> None:
            link.read(self._on_line)
            self._on_end(link)

        threading.Thread(target=read, name="fddp-member", daemon=True).start()
        return link
