"""Assigns rows to processes: an epoch is one permutation, dealt out batch by batch.

The order depends on the seed and the epoch only, so no process sends it: each computes the same
permutation and takes its part of each batch. A step reads the same rows on any number of processes.
Any step can be computed without the earlier steps, so a restart needs only its number.

A restart continues an epoch that an earlier version began, so `shuffle=True` has one order in all
versions: NumPy's permutation.

Batches are always full, as a step is compiled for one shape: an epoch that does not end with a
batch is padded or cut.

Source: `DistributedSampler` in torch.utils.data.distributed; it pads to the number of replicas
instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from jaxtyping import Int

from fddp.wording import check_switch, check_whole


def samples(
    rows: int,
    batch: int,
    *,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    virtual_replicas: int | None = None,
    start_step: int = 0,
) -> Iterator[Int[np.ndarray, " local"]]:
    """Yields the numbers of the rows that one process reads, step by step, without end.

    All processes read the same rows in a step, for any number of processes. So a training may
    continue on fewer or more processes, with the same `batch`, and its next step as `start_step`.

    Args:
      rows: number of rows of the data.
      batch: rows per step, over all processes.
      rank: number of this process, `group.rank`.
      size: number of processes, `group.processes`; each reads the rows of all its devices.
      seed: determines the order, together with the epoch; equal on all processes.
      shuffle: True: an epoch is NumPy's permutation, which every process stores (4 bytes per row);
        False: 0, 1, 2, …
      drop_last: True: drops the rows of an epoch that do not fill a batch; False: fills the last
        batch with the epoch's first rows, repeated as needed.
      virtual_replicas: the step's option, if set: each virtual replica reads the same rows, in the
        same order, on any number of processes. None: the number of processes.
      start_step: first step; earlier steps cost nothing.

    Returns:
      An iterator over steps, each an array of `batch // size` row numbers.

    Raises:
      ValueError: a value out of its range or no whole number, `batch` not a multiple of `size`, or
        no batch with `drop_last`; before the first step.
      TypeError: `shuffle` or `drop_last` is not a bool.

    Example:
      >>> steps = samples(5, 4, rank=1, size=2, shuffle=False)
      >>> [next(steps).tolist() for _ in range(3)]
      [[1, 3], [0, 2], [1, 3]]
    """
    start = check_whole("start_step", start_step, 0)
    deal = Deal(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)
    return _walk(deal, start)  # `samples` itself checks its arguments before the first step


def _walk(deal: "Deal", start: int) -> Iterator[Int[np.ndarray, " local"]]:
    first_epoch, first_step = divmod(start, deal.steps)
    for epoch in count(first_epoch):
        order = deal.order(epoch)
        for step in range(first_step, deal.steps):
            yield order(deal.positions(step)).astype(np.int64)
        first_step = 0
        del order  # before the next epoch's is drawn


@dataclass(frozen=True)
class Deal:
    """The arguments of `samples`, checked."""

    rows: int
    batch: int
    rank: int
    size: int
    seed: int
    shuffle: bool
    drop_last: bool
    virtual_replicas: int | None

    @property
    def steps(self) -> int:
        """Number of batches of an epoch."""
        if self.drop_last:
            return self.rows // self.batch
        return -(-self.rows // self.batch)

    def order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        """Returns the function from positions in an epoch to rows."""
        if not self.shuffle:
            return lambda positions: positions
        order = np.arange(self.rows, dtype=np.uint32 if self.rows <= 1 << 32 else np.int64)
        # Unlike PyTorch's seed + epoch: its epoch 1 of seed 0 is epoch 0 of seed 1.
        np.random.default_rng([self.seed, epoch]).shuffle(order)
        return order.__getitem__

    def positions(self, step: int) -> Int[np.ndarray, " local"]:
        """Returns the positions in an epoch that the process reads in a step."""
        batch = np.arange(step * self.batch, (step + 1) * self.batch) % self.rows
        replicas = self.virtual_replicas or self.size
        local_replicas = replicas // self.size
        first = self.rank * local_replicas
        return batch.reshape(-1, replicas).T[first : first + local_replicas].ravel()

    def __post_init__(self) -> None:
        least = {"rows": 1, "batch": 1, "size": 1, "rank": 0, "seed": 0}
        if self.virtual_replicas is not None:
            least["virtual_replicas"] = 1
        for name, limit in least.items():  # Narrow NumPy integers would overflow.
            object.__setattr__(self, name, check_whole(name, getattr(self, name), limit))
        check_switch("shuffle", self.shuffle)
        check_switch("drop_last", self.drop_last)
        rows, batch, size, replicas = self.rows, self.batch, self.size, self.virtual_replicas
        if self.rank >= size:
            raise ValueError(
                f"rank must be below size, {size}, got {self.rank}: ranks count from 0."
            )
        if replicas is not None and replicas % size:
            raise ValueError(
                f"virtual_replicas must be a multiple of size, {size}, got {replicas}: each "
                f"process computes the same number; give {replicas + -replicas % size}."
            )
        if replicas is not None and batch % replicas:
            raise ValueError(
                f"batch must be a multiple of virtual_replicas, {replicas}, got {batch}: each "
                f"reads the same number of rows; give {batch + -batch % replicas}."
            )
        if batch % size:
            raise ValueError(
                f"batch must be a multiple of size, {size}, got {batch}: it counts the rows of all "
                f"processes, and each reads the same number; give {batch + -batch % size}."
            )
        if self.drop_last and rows < batch:
            raise ValueError(
                f"batch must be at most rows, {rows}, got {batch}: drop_last=True would drop the "
                "only batch."
            )
