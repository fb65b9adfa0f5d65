"""The thread of a lane, which exchanges the messages of programs with the other ranks.

A program starts a message by a custom call that returns at once, and awaits it by another one. The
calls are in `lane.cc`, which is compiled when fddp is installed. A custom call in Python would wait
for the GIL.
"""

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeAlias

import jax
import numpy as np

from fddp.comm.journal import Journal
from fddp.program import Kind

LIBRARY = Path(__file__).with_name("liblane.so")
# (kind, array): exchanges an array with the other ranks, in place. The array is flat for a sum, and
# has a row of bytes for each rank otherwise; a gather finds this rank's array in the first row.
Send: TypeAlias = Callable[[Kind, np.ndarray], None]

REMEMBERED = 8192  # as in `lane.cc`
ENDS, CHOICE = 2, 3  # as in `lane.cc`
THREAD = "fddp-lane"
LAST_S = 30.0  # for the last messages, at the end of Python

_identities = count()


class Stamps(ctypes.Structure):
    """A lane's record of a message, as in `lane.cc`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("call", "program", "nbytes")),
        *((name, ctypes.c_double) for name in ("started", "sent", "received")),
        *((name, ctypes.c_double) for name in ("awaited", "resumed", "done")),
        ("name", ctypes.c_char * 32),
    ]


class Message(ctypes.Structure):
    """A message, as in `lane.cc`."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("number", ctypes.c_int32), ("late", ctypes.c_bool)),
        *(("kind", ctypes.c_char * 16), ("dtype", ctypes.c_char * 16), ("stamps", Stamps)),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Loads the custom calls, and registers them with XLA; None if they were not compiled."""
    if not LIBRARY.exists():
        return None
    calls = ctypes.CDLL(str(LIBRARY))
    for name in ("fddp_program", "fddp_start", "fddp_done"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(calls, name)), platform="cpu")
    number = ctypes.c_int64
    calls.fddp_lane_next.argtypes = [number, ctypes.c_int32, ctypes.POINTER(Message)]
    calls.fddp_lane_finish.argtypes = [number, ctypes.POINTER(Message)]
    calls.fddp_lane_stamps.argtypes = [number, ctypes.c_void_p, number]
    calls.fddp_lane_stamps.restype = number
    calls.fddp_lane_end.argtypes = [number]
    calls.fddp_lane_close.argtypes = [number, ctypes.c_char_p]
    return calls


def start_lane(size: int, send: Send, journal: Journal, last: Sequence[Any]) -> int:
    """Starts the thread of a lane, and returns the lane's number.

    `last` has the token of its last program.
    """
    lane = next(_identities)
    args = lane, size, send, journal, last
    threading.Thread(target=_carry, args=args, name=THREAD, daemon=True).start()
    return lane


def end_lane(lane: int) -> None:
    """Closes a lane behind the messages of its last program."""
    calls: Any = library()
    calls.fddp_lane_end(lane)


def stamps(lane: int) -> list[Stamps]:
    """The stamps of a lane's last messages, in order."""
    calls: Any = library()
    memory = (Stamps * REMEMBERED)()
    return memory[: calls.fddp_lane_stamps(lane, memory, REMEMBERED)]


def _carry(lane: int, size: int, send: Send, journal: Journal, last: Sequence[Any]) -> None:
    """Exchanges the messages of a lane, in order, until it is closed."""
    calls: Any = library()
    message = Message()
    chosen = -1
    while state := calls.fddp_lane_next(lane, chosen, message):
        try:
            if state == CHOICE:
                numbers = np.full((size, 1), message.number, np.int32)
                with journal.message("the next message", 4):
                    send("gather", numbers)
                chosen = int(numbers[0, 0])  # by the first rank
                continue
            if state == ENDS:
                if last[0].is_ready():
                    calls.fddp_lane_close(lane, b"the group has ended")
                continue
            chosen = -1
            if nbytes := message.stamps.nbytes:
                memory: Any = (ctypes.c_char * nbytes).from_address(message.data)
                with journal.message(message.stamps.name.decode(), nbytes):
                    if message.kind == b"sum":
                        send("sum", np.frombuffer(memory, message.dtype.decode()))
                    else:
                        rows = np.frombuffer(memory, np.uint8).reshape(size, -1)
                        send(message.kind.decode(), rows)
        except BaseException as error:  # the program that waits for the message raises it
            calls.fddp_lane_close(lane, f"{type(error).__name__}: {error}".encode())
            return
        calls.fddp_lane_finish(lane, message)


@atexit.register
def _end_lanes() -> None:
    """Ends the lanes when their last messages have travelled, for which other ranks may wait.

    Python aborts if it ends in a thread that frees a JAX array, as a collection of garbage does.
    Exit handlers of a script run before this one: it imports this module first.
    """
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD]
    if not threads or hasattr(sys, "last_value"):  # an error: a message may lack a rank
        return
    end = monotonic() + LAST_S
    while monotonic() < end and not all(array.is_ready() for array in jax.live_arrays()):
        sleep(0.005)
    for lane in range(next(_identities)):
        end_lane(lane)
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
