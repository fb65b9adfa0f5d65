"""Connections between the members of a job: lines of JSON over TCP, from proven members only.

Each connection has a thread that reads it. The end of a process closes its connections, which the
other members notice at once; a stopped process or a broken network is noticed by silence alone.

The addresses of the members are in a file, for processes that start later. `python -m fddp run
--elastic` names its folder. Without it a process connects to rank 0.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fddp.elastic.views import Member, View
from fddp.runtime import FINISHED, FOLDER, LOST, MEMBERS, place_of
from fddp.runtime.watching import write_stderr

MOST = 1 << 20  # bytes of a line
SEND_S = 2  # a member that reads nothing for this time is silent
CONNECT_S = 2.0
RETRY_S = 0.2


class Connection:
    """A connection to another member."""

    def __init__(self, uid: str, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        limit = struct.pack("ll", SEND_S, 0)  # seconds, microseconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
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

    def lines(self) -> Iterator[Any]:
        """Yields the received lines, until the connection ends."""
        with suppress(OSError, ValueError):  # a broken network, or no JSON
            with suppress(ConnectionResetError):
                while line := self._lines.readline(MOST):
                    yield json.loads(line)
            self.ended = True

    def finish(self) -> None:
        """Ends the sending side; earlier lines still arrive, and the connection can be read."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


### Addresses


def known_addresses(coordinator: str | None) -> list[str]:
    """The addresses of members as they have written them, and that of rank 0."""
    path = _file()
    members = json.loads(path.read_text()) if path and path.exists() else []
    addresses = [address for _, _, address in members]
    return [*addresses, coordinator] if coordinator else addresses


def request_entry(
    connect: Callable[[str], Connection], member: Member, coordinator: str | None, deadline: float
) -> None:
    """Connects to a member and requests entry into its job; TimeoutError if none answers."""
    while True:
        addresses = known_addresses(coordinator)
        for address in addresses:
            with suppress(OSError):
                connect(address).send({"join": member})
                return
        end_with_job()
        if time.monotonic() > deadline:
            places = ", ".join(addresses) or "any address"
            raise TimeoutError(f"no rank of this job answers at {places}")
        time.sleep(RETRY_S)


def end_with_job() -> None:
    """Ends this script, as one that has succeeded, if a rank has reached the end of the job."""
    path = _file()
    if path and path.with_name(FINISHED).exists():
        write_stderr("the job has reached its end.")
        raise SystemExit(0)


def is_founded(coordinator: str | None) -> bool:
    """False if no member of this host has written addresses, and rank 0 does not listen."""
    path = _file()
    if path and path.exists():
        return True
    if coordinator is None:
        return False
    try:
        socket.create_connection(place_of(coordinator), CONNECT_S).close()
    except OSError as error:  # a silent host causes another one
        return not isinstance(error, ConnectionRefusedError)
    return True


def own_host(coordinator: str | None) -> str:
    """The address of this host by which it reaches the members."""
    for address in known_addresses(coordinator):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(place_of(address))
            return probe.getsockname()[0]
    return "127.0.0.1"


def write_members(view: View) -> None:
    if path := _file():
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f"{path.name}.{os.getpid()}")
        staging.write_text(json.dumps(view.members))
        staging.replace(path)


def report_lost(uid: str) -> None:
    """Has `python -m fddp run` end a silent process, if it is of this host."""
    if path := _file():
        lost = path.with_name(LOST)
        lost.mkdir(parents=True, exist_ok=True)
        (lost / uid).touch()


def _file() -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder) / MEMBERS if folder else None
