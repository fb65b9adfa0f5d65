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
from typing import Any, TypeAlias, get_args

import jax
import numpy as np

from fddp.comm.journal import Journal
from fddp.program import Kind

LIBRARY = Path(__file__).with_name("liblane.so")
KINDS: tuple[Kind, ...] = get_args(Kind)
# Attributes of a custom call are numbers. Other dtypes are only moved, as words of their size.
DTYPES = [
    *map(np.dtype, ("float32", "float64", "int32", "int64", "complex64", "complex128", "bool")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64", "int8", "int16")),
]
# (kind, array): exchanges an array with the other ranks, in place. The array is flat for a sum, and
# has a row for each rank otherwise; a gather finds this rank's array in the first row.
Send: TypeAlias = Callable[[Kind, np.ndarray], None]

TIMES = "started", "sent", "received", "awaited", "resumed", "done"
REMEMBERED = 8192  # as in `lane.cc`
ENDS, CHOICE = 2, 3  # as in `lane.cc`
THREAD = "fddp-lane"
LAST_S = 30.0  # for the last messages, at the end of Python

_identities = count()


class Stamps(ctypes.Structure):
    """The record of a message in its lane, as in `lane.cc`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("call", "program", "nbytes")),
        *((name, ctypes.c_double) for name in TIMES),
        ("name", ctypes.c_char * 32),
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
    calls.fddp_lane_next.argtypes = [number, ctypes.c_int32, *[ctypes.c_void_p] * 6]
    calls.fddp_lane_finish.argtypes = [number, ctypes.c_int32, ctypes.c_void_p, number]
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
    number = ctypes.c_int32()
    nbytes, kind, dtype = (ctypes.c_int64() for _ in range(3))
    data = ctypes.c_void_p()
    title = ctypes.create_string_buffer(32)
    outputs = list(map(ctypes.addressof, (number, data, nbytes, kind, dtype, title)))
    chosen = -1
    while state := calls.fddp_lane_next(lane, chosen, *outputs):
        try:
            if state == CHOICE:
                with journal.message("the next message", 4):
                    chosen = _of_first_rank(size, send, number.value)
                continue
            if state == ENDS:
                if last[0].is_ready():
                    calls.fddp_lane_close(lane, b"the group has ended")
                continue
            chosen = -1
            if nbytes.value:
                memory: Any = (ctypes.c_char * nbytes.value).from_address(data.value or 0)
                array = np.frombuffer(memory, DTYPES[dtype.value])
                name = KINDS[kind.value]
                with journal.message(title.value.decode(), nbytes.value):
                    send(name, array if name == "sum" else array.reshape(size, -1))
        except BaseException as error:  # the program that waits for the message raises it
            calls.fddp_lane_close(lane, f"{type(error).__name__}: {error}".encode())
            return
        calls.fddp_lane_finish(lane, number.value, data.value, nbytes.value)


def _of_first_rank(size: int, send: Send, number: int) -> int:
    """The first rank's choice of the next message."""
    numbers = np.full((size, 1), number, np.int32)
    send("gather", numbers)
    return int(numbers[0, 0])


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
