"""Gathers bytes from every process, which may have unequally many."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a group compares bytes, too
    from fddp.comm.group import Group

CHUNK_BYTES = 64 * 2**20


def gather_bytes(group: "Group", data: bytes) -> list[bytes]:
    """Collects bytes from every process, in packed chunks of at most 64 MiB from each.

    Args:
      group: the ranks that gather; every rank calls it.
      data: this rank's bytes, any number of them.

    Returns:
      The bytes of each process, in order of rank.

    Example:
      >>> import fddp
      >>> gather_bytes(fddp.init(), b"abc")
      [b'abc']
    """
    lengths = group.all_gather(np.int64(len(data))).tolist()
    padded = np.frombuffer(data.ljust(max(lengths)), np.uint8)
    chunks = [group.all_gather(padded[at : at + CHUNK_BYTES]) for at in range(0, padded.size, CHUNK_BYTES)]
    rows = np.concatenate([np.zeros((group.processes, 0), np.uint8), *chunks], axis=1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]
