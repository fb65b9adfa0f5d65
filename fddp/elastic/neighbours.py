"""Copies of the members' parts of a state: each member sends its part to the next one.

A copy is sent under the next step, and has arrived before that step ends. So a lost member's part
exists after every step but perhaps the last, and the members keep their own parts of both.

Source: in-memory checkpoints of neighbours, Wang et al., "Gemini" (SOSP 2023).
"""

import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from fddp.elastic.held_state import HeldState, Store

RETAINED = 3  # steps: that of the lost member, the one before it, and one under way
SIZE_BYTES = 8
LOOK_S = 0.05
RECEIVED = b"\x01"

Call = Callable[[], tuple[str, socket.socket, IO[bytes]]]


class Copies:
    """This member's own part, and the one of the member before it."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._sending = threading.Lock()
        self._under_way: threading.Thread | None = None
        self._connection: socket.socket | None = None
        self._store: Store = {}

    @property
    def store(self) -> Store:
        """All parts on this host."""
        return dict(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts on this host."""
        return sum(held_state.nbytes for held_state in self.store.values())

    def hold(self, held_state: HeldState) -> None:
        """Stores this member's part, and forgets older ones."""
        self._put(self._uid, held_state)

    def send(self, held_state: HeldState, call: Call) -> None:
        """Begins to send this member's part to the member that `call` calls.

        If that member is lost, the part is not sent, and the members regroup.
        """
        # Python waits at its end for threads that are no daemons, before it calls `atexit`.
        thread = threading.Thread(target=self._send, args=(held_state, call), daemon=True)
        thread.start()
        self._under_way = thread

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Waits until the last part has arrived, or the members regroup."""
        while self._under_way and self._under_way.is_alive() and not given_up():
            self._under_way.join(LOOK_S)

    def receive(self, uid: str, connection: socket.socket, stream: IO[bytes]) -> None:
        """Stores the copies of another member until the connection ends."""
        connection.settimeout(None)
        with connection, stream, suppress(OSError, EOFError):
            while size := int.from_bytes(stream.read(SIZE_BYTES)):
                data = stream.read(size)
                if len(data) < size:
                    return
                self._put(uid, pickle.loads(data))
                connection.sendall(RECEIVED)

    def disconnect(self) -> None:
        """Ends the connection to the next member, which another one replaces."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection = self._under_way = None

    def forget(self, epoch: int) -> None:
        """Drops the parts of views before `epoch`."""
        for key in [key for key in self._store if key[1][1] < epoch]:
            self._store.pop(key, None)

    def _send(self, held_state: HeldState, call: Call) -> None:
        # The other member has the leaves that are whole.
        data = pickle.dumps(held_state._replace(forms={}, leaves={}), protocol=5)
        with self._sending:
            try:
                connection = self._connection  # `disconnect` may drop it at any time
                if connection is None:
                    _, connection, _ = call()
                    connection.settimeout(None)
                    self._connection = connection
                connection.sendall(len(data).to_bytes(SIZE_BYTES))
                connection.sendall(data)
                if connection.recv(1) != RECEIVED:
                    self._connection = None
            except OSError:
                self._connection = None

    def _put(self, uid: str, held_state: HeldState) -> None:
        self._store[uid, held_state.version] = held_state
        number, epoch = held_state.version
        for key in list(self._store):
            if key[0] == uid and key[1][1] == epoch and key[1][0] <= number - RETAINED:
                self._store.pop(key, None)
