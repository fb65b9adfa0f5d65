"""Collectives of Python's own objects, which travel as pickles of any size.

Reading a pickle runs the code in it. The ranks of one job trust each other, and each pickle is signed with the job's
secret: a process without the secret cannot make the ranks run anything.

Source: `all_gather_object` and `broadcast_object_list` in PyTorch's `distributed_c10d.py`. Unlike there, an object that
cannot be pickled, or read, is the same error on every rank.
"""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fddp.comm.agreement import verify
from fddp.comm.allgatherv import gather_bytes
from fddp.comm.secret import SECRET, signature, signed

if TYPE_CHECKING:  # a group has them as methods
    from fddp.comm.group import Group

Made = TypeVar("Made")
DIGITS = len(signature())  # in front of a pickle


def all_gather_object(group: "Group", obj: Any) -> list[Any]:
    """Collects an object from every process.

    Args:
      group: the ranks that gather; every rank calls it.
      obj: this rank's object.

    Returns:
      The objects, in order of rank.

    Raises:
      TypeError: an object cannot be pickled; on every rank.
      ValueError: an object cannot be read; on every rank.
    """
    data = _alike(group, "", lambda: _pickled("all_gather_object", obj))
    sent = gather_bytes(group, data)
    return _alike(group, "", lambda: [_read("all_gather_object", rank, one) for rank, one in enumerate(sent)])


def broadcast_object(group: "Group", obj: Any, root: int) -> Any:
    """Gives every process the root's object.

    Args:
      group: the ranks that get it; every rank calls it.
      obj: the root's object counts.
      root: rank whose object counts.

    Returns:
      The object, a copy on the root as well.

    Raises:
      TypeError: the object cannot be pickled; on every rank.
      ValueError: the object cannot be read, or there is no such rank; on every rank.
    """
    data = _alike(group, f"root={root}", lambda: _pickled("broadcast_object", obj) if group.rank == root else b"")
    length = int(group.broadcast(np.int64(len(data)), root))
    sent = group.broadcast(np.frombuffer(data.ljust(length), np.uint8), root).tobytes()
    return _alike(group, f"root={root}", lambda: _read("broadcast_object", root, sent))


def _alike(group: "Group", said: str, make: Callable[[], Made]) -> Made:
    """Calls `make` on every rank; fails on every rank if it fails on one, or if `said` differs between ranks."""
    return verify(group, "objects", make, lambda made: [said])


def _pickled(call: str, obj: Any) -> bytes:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # whatever the object's own code raises
        raise TypeError(
            f"group.{call} sends pickles, and this {type(obj).__name__} cannot be pickled ({error}): give numbers, "
            "strings, arrays, or containers of them."
        ) from error
    return signature(data).encode() + data


def _read(call: str, rank: int, data: bytes) -> Any:
    signed_by, pickled = data[:DIGITS].decode(errors="replace"), data[DIGITS:]
    if not signed(signed_by, pickled):
        raise ValueError(
            f"group.{call}: rank {rank} signed its object with another secret: give all ranks the same {SECRET}."
        )
    try:
        return pickle.loads(pickled)
    except Exception as error:  # a class that this process does not have, say
        raise ValueError(f"group.{call} cannot read here what rank {rank} sent: {error}.") from error
