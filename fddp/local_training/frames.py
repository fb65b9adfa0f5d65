"""The words between islands and the keeper of the shared parameters, over TCP: a line of JSON, then arrays' bytes.

Both know the arrays' forms, so that only bytes travel. Numbers of a host go as they lie in its memory.
"""

import json
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST = 65536  # bytes of a line


def tell(door: socket.socket, line: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """Sends a line, and arrays behind it.

    Args:
      door: the connection.
      line: what can be written as JSON.
      arrays: as many as the other side expects.

    Raises:
      OSError: the connection is gone, or takes nothing for longer than its timeout.
    """
    for left in (memoryview(json.dumps(line).encode() + b"\n"), *map(_bytes, arrays)):
        while left:  # sendall's timeout counts for all of it, however steadily bytes go
            left = left[door.send(left) :]


def hear(door: socket.socket, until: float = math.inf) -> dict[str, Any]:
    """Receives a line, and none of what stands behind it.

    Args:
      door: the connection.
      until: time of the monotonic clock at which the line is to be complete.

    Returns:
      The line.

    Raises:
      OSError: the connection is gone, or what came is no line, or nothing came for longer than its timeout.
    """
    heard = bytearray()
    while not heard.endswith(b"\n"):
        # A line is short, and rare: it is read so that the arrays behind it stay where they are.
        byte = door.recv(1)
        if not byte or len(heard) > MOST or time.monotonic() > until:
            raise ConnectionResetError("the connection has ended")
        heard += byte
    try:
        line = json.loads(heard)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise ConnectionResetError("the connection brings no lines of this job")
    return line


def hear_arrays(door: socket.socket, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Receives arrays.

    Args:
      door: the connection.
      like: arrays of the same shapes and dtypes.

    Returns:
      The arrays, in memory of their own.

    Raises:
      OSError: as for `hear`.
    """
    return [_array(door, x) for x in like]


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _array(door: socket.socket, like: np.ndarray) -> np.ndarray:
    data = np.empty(like.nbytes, np.uint8)
    left = data.data
    while left:
        count = door.recv_into(left)
        if not count:
            raise ConnectionResetError("the connection has ended")
        left = left[count:]
    return data.view(like.dtype).reshape(like.shape)
