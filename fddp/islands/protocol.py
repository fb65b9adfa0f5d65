"""Protocol between islands and their server, over TCP: a JSON header line, then bytes of arrays.

Both ends know the shapes and dtypes of the arrays, so that only bytes are sent, in the byte order
of the host.
"""

import json
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST = 65536  # bytes of a header


def send_message(
    connection: socket.socket, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()
) -> None:
    """Sends a header and arrays; raises OSError if the peer closes or times out."""
    for view in (memoryview(json.dumps(header).encode() + b"\n"), *map(_bytes, arrays)):
        while view:  # the timeout of sendall would limit the total time of a steady transfer
            view = view[connection.send(view) :]


def receive_header(connection: socket.socket, until: float = math.inf) -> dict[str, Any]:
    """Receives a header, before a deadline of the monotonic clock.

    It raises OSError if the peer closes, times out or sends another protocol.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        # Single bytes leave the arrays behind the header in the socket; headers are short and rare.
        byte = connection.recv(1)
        if not byte or len(received) > MOST or time.monotonic() > until:
            raise ConnectionResetError("the connection has ended")
        received += byte
    try:
        header = json.loads(received)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ConnectionResetError("the connection brings no lines of this job")
    return header


def receive_arrays(connection: socket.socket, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Receives new arrays with the shapes and dtypes of `like`."""
    return [_array(connection, x) for x in like]


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _array(connection: socket.socket, like: np.ndarray) -> np.ndarray:
    data = np.empty(like.nbytes, np.uint8)
    view = data.data
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]
    return data.view(like.dtype).reshape(like.shape)
