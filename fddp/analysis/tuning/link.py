"""Measures the cost of an all-reduce: a latency, and seconds per byte.

Source: the alpha-beta model of messages; Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import jax
import numpy as np

from fddp.buckets import MiB
from fddp.comm import Group
from fddp.jax_internals import without_context_mesh

LINK_BYTES = tuple(4**k * 1024 for k in range(3, 8))  # 64 KiB to 16 MiB
LINK_ROUNDS = 3
LINK_ROW_BYTES = 4 * MiB


class Link(NamedTuple):
    """A straight line through measured all-reduces: `seconds(n)` = latency + n ÷ bandwidth.

    Example:
      >>> Link(latency_s=1e-3, bytes_per_s=1e8).seconds(10**7)
      0.101
    """

    latency_s: float
    """Seconds of an all-reduce of 0 bytes."""
    bytes_per_s: float
    """Bytes of the array over seconds; the algorithm may send more bytes than that."""

    def seconds(self, nbytes: float) -> float:
        """Returns the duration of an all-reduce while nothing else runs.

        Args:
          nbytes: bytes of one replica's array.

        Returns:
          Seconds.
        """
        return self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{1e3 * self.latency_s:.3f} ms + bytes ÷ {self.bytes_per_s / 1e6:.1f} MB/s"


@without_context_mesh
def measure_link(
    group: Group, nbytes: Sequence[int] = LINK_BYTES, rounds: int = LINK_ROUNDS
) -> Link:
    """Measures all-reduces of several sizes while nothing else runs; equal on all ranks."""

    def seconds(size: int) -> float:
        payload = group.placement.place(np.ones(size // 4, np.float32), group.placement.per_replica)
        # All-reduces leave in a row, as in the staged schedule. Buffers of sockets or of a switch
        # pass a single message of some 100 KiB at no cost, but not a step's traffic.
        row = max(2, LINK_ROW_BYTES // size)
        times = []
        for _ in range(rounds + 1):
            group.barrier()
            start = perf_counter()
            for _ in range(row):
                jax.block_until_ready(group.transport.all_reduce(payload))
            times.append((perf_counter() - start) / row)
        return median(times[1:])  # the first round compiles

    # The last rank to enter an all-reduce does not wait in it, so the minimum over ranks counts.
    return fit_link(nbytes, group.all_reduce([*map(seconds, nbytes)], op="min").tolist())


def fit_link(nbytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fits latency and bandwidth by least squares of the *relative* error.

    Small messages count as much as large ones, since the noise of large ones would drown the
    latency otherwise. The latency is never negative; the bandwidth is infinite if time does not
    grow with size. Raises ValueError for fewer than two sizes or a time that is not positive.

    >>> link = fit_link([1e6, 2e6, 4e6], [0.012, 0.022, 0.042])
    >>> round(link.latency_s, 9), round(link.bytes_per_s)
    (0.002, 100000000)
    """
    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise ValueError(
            f"a fit needs a time for each of two sizes or more, got {list(nbytes)} and "
            f"{list(seconds)}."
        )
    if not all(s > 0 for s in seconds):
        raise ValueError(f"all-reduces take more than 0 seconds, got {list(seconds)}.")
    sizes = np.asarray(nbytes, float)
    times = np.asarray(seconds, float)
    terms = np.stack([1 / times, sizes / times], axis=1)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
    if latency < 0:  # the best line through the origin
        latency = 0.0
        per_byte = float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    if per_byte <= 0:
        return Link(float(latency), np.inf)
    return Link(float(latency), float(1 / per_byte))
