"""Collectives of Python objects, sent as pickles of any size.

Reading a pickle runs its code. The ranks of one job trust each other, and each pickle is signed
with the job's secret: a process without the secret cannot run code on the ranks.

Source: `all_gather_object` and `broadcast_object_list` in PyTorch's `distributed_c10d.py`. Here an
error of pickling or reading is the same on every rank.
"""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fddp.comm.agreement import verify
from fddp.comm.host_bytes import gather_bytes
from fddp.comm.secret import SECRET, signature, signed

if TYPE_CHECKING:  # a group has them as methods
    from fddp.comm.group import Group

Made = TypeVar("Made")
DIGITS = len(signature())  # in front of a pickle


def all_gather_object(group: "Group", obj: Any) -> list[Any]:
    """Implements `Group.all_gather_object`."""
    data = _alike(group, "", lambda: _pickled("all_gather_object", obj))
    pickles = gather_bytes(group, data)
    return _alike(
        group,
        "",
        lambda: [_read("all_gather_object", rank, pickled) for rank, pickled in enumerate(pickles)],
    )


def broadcast_object(group: "Group", obj: Any, root: int) -> Any:
    """Implements `Group.broadcast_object`."""

    def data_of_root() -> bytes:
        if group.rank != root:
            return b""
        return _pickled("broadcast_object", obj)

    data = _alike(group, f"root={root}", data_of_root)
    length = int(group.broadcast(np.int64(len(data)), root))
    message = group.broadcast(np.frombuffer(data.ljust(length), np.uint8), root).tobytes()
    return _alike(group, f"root={root}", lambda: _read("broadcast_object", root, message))


def _alike(group: "Group", request: str, make: Callable[[], Made]) -> Made:
    """Calls `make`; raises on all ranks if it raises on one, or if `request` differs."""
    return verify(group, "objects", make, lambda result: [request])


def _pickled(call: str, obj: Any) -> bytes:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # any error of the object's code
        raise TypeError(
            f"group.{call} sends pickles, and this {type(obj).__name__} cannot be pickled "
            f"({error}): give numbers, strings, arrays, or containers of them."
        ) from error
    return signature(data).encode() + data


def _read(call: str, rank: int, data: bytes) -> Any:
    signed_by, pickled = data[:DIGITS].decode(errors="replace"), data[DIGITS:]
    if not signed(signed_by, pickled):
        raise ValueError(
            f"group.{call}: rank {rank} signed its object with another secret: give all ranks the "
            f"same {SECRET}."
        )
    try:
        return pickle.loads(pickled)
    except Exception as error:  # for example a class unknown to this process
        raise ValueError(f"group.{call} cannot read the object of rank {rank}: {error}.") from error
