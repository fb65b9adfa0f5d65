"""Gathers bytes of unequal length from every process."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a group compares bytes, too
    from fddp.comm.group import Group

CHUNK_BYTES = 64 * 2**20


def gather_bytes(group: "Group", data: bytes) -> list[bytes]:
    """Returns the bytes of each process on every process, sent in chunks of at most 64 MiB.

    >>> import fddp
    >>> gather_bytes(fddp.init(), b"abc")
    [b'abc']
    """
    lengths = group.all_gather(np.int64(len(data))).tolist()
    padded = np.frombuffer(data.ljust(max(lengths)), np.uint8)
    chunks = [
        group.all_gather(padded[begin : begin + CHUNK_BYTES])
        for begin in range(0, padded.size, CHUNK_BYTES)
    ]
    rows = np.concatenate([np.zeros((group.processes, 0), np.uint8), *chunks], axis=1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]
