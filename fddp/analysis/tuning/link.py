"""What an all-reduce costs: a latency, and seconds for every byte.

Source: the alpha-beta model of messages; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Link(NamedTuple):
    """A straight line through measured all-reduces: `seconds(n)` = latency + n ÷ bandwidth.

    Example:
      >>> Link(latency_s=1e-3, bytes_per_s=1e8).seconds(10**7)
      0.101
    """

    latency_s: float
    """Seconds that the smallest all-reduce takes."""
    bytes_per_s: float
    """Bytes of the array over seconds, whatever the algorithm puts on the wire for them."""

    def seconds(self, nbytes: float) -> float:
        """What an all-reduce of so many bytes takes when nothing else runs.

        Args:
          nbytes: bytes of one replica's array.

        Returns:
          Seconds.
        """
        return self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{1e3 * self.latency_s:.3f} ms + bytes ÷ {self.bytes_per_s / 1e6:.1f} MB/s"


def fit_link(nbytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fits latency and bandwidth to measured all-reduces by least squares of the *relative* error.

    Small messages count as much as large ones: their latency would otherwise drown in the noise of the others.

    Args:
      nbytes: sizes, at least two different ones.
      seconds: what each took.

    Returns:
      The link; its latency is not negative, its bandwidth infinite where time does not grow with size.

    Raises:
      ValueError: fewer than two sizes, or a time that is not positive.

    Example:
      >>> link = fit_link([1e6, 2e6, 4e6], [0.012, 0.022, 0.042])
      >>> round(link.latency_s, 9), round(link.bytes_per_s)
      (0.002, 100000000)
    """
    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise ValueError(f"a fit needs a time for each of two sizes or more, got {list(nbytes)} and {list(seconds)}.")
    if not all(s > 0 for s in seconds):
        raise ValueError(f"all-reduces take more than 0 seconds, got {list(seconds)}.")
    sizes, times = np.asarray(nbytes, float), np.asarray(seconds, float)
    latency, per_byte = np.linalg.lstsq(np.stack([1 / times, sizes / times], axis=1), np.ones(len(times)), rcond=None)[
        0
    ]
    if latency < 0:  # the best line through the origin
        latency, per_byte = 0.0, float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    return Link(float(latency), float(1 / per_byte) if per_byte > 0 else np.inf)
