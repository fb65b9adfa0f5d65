"""Assigns rows to processes: an epoch is one permutation, dealt out batch by batch.

The order depends on the seed and the epoch only, so no process stores or sends it: each computes
the same permutation and takes its part of each batch. A step reads the same rows on any number of
processes. Any step can be computed without the earlier steps, so a restart needs only its number.

Batches are always full, as a step is compiled for one shape: an epoch that does not end with a
batch is padded or cut.

Source: `DistributedSampler` in torch.utils.data.distributed; it pads to the number of replicas
instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Int


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
      shuffle: True: an epoch is a permutation; False: 0, 1, 2, …
      drop_last: True: drops the rows of an epoch that do not fill a batch; False: fills the last
        batch with the epoch's first rows, repeated as needed.
      virtual_replicas: the step's option, if set: each virtual replica reads the same rows, in the
        same order, on any number of processes. None: the number of processes.
      start_step: first step; earlier steps cost nothing.

    Returns:
      An iterator over steps, each an array of `batch // size` row numbers.

    Raises:
      ValueError: a value out of its range, `batch` not a multiple of `size`, or no batch with
        `drop_last`; before the first step.
      TypeError: a number that is not whole, or a switch that is not a bool.

    Example:
      >>> steps = samples(5, 4, rank=1, size=2, shuffle=False)
      >>> [next(steps).tolist() for _ in range(3)]
      [[1, 3], [0, 2], [1, 3]]
    """
    start = _whole("start_step", start_step, least=0)
    deal = Deal(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)
    return _walk(deal, start)  # `samples` itself checks its arguments before the first step


def epoch_samples(
    rows: int, batch: int, epoch: int, **options: Any
) -> Int[np.ndarray, "steps local"]:
    """Returns the numbers of the rows that one process reads in an epoch; see `samples`.

    >>> epoch_samples(8, 4, 0, rank=1, size=2, shuffle=False)
    array([[1, 3],
           [5, 7]])
    """
    return Deal(rows, batch, **options).epoch(_whole("epoch", epoch, least=0))


def _walk(deal: "Deal", start: int) -> Iterator[Int[np.ndarray, " local"]]:
    first_epoch, first_step = divmod(start, deal.steps)
    yield from deal.epoch(first_epoch)[first_step:]
    for epoch in count(first_epoch + 1):
        yield from deal.epoch(epoch)


@dataclass
class Deal:
    """The arguments of `samples`, checked."""

    rows: int
    batch: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    virtual_replicas: int | None = None

    @property
    def steps(self) -> int:
        """Number of batches of an epoch."""
        if self.drop_last:
            return self.rows // self.batch
        return -(-self.rows // self.batch)

    def epoch(self, epoch: int) -> Int[np.ndarray, "steps local"]:
        """Returns the numbers of the rows that the process reads in an epoch."""
        order = np.arange(self.rows)
        if self.shuffle:
            # Unlike PyTorch's seed + epoch: its epoch 1 of seed 0 is epoch 0 of seed 1.
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        # np.resize cuts, or repeats from the front.
        batches = np.resize(order, (self.steps, self.batch))
        replicas = self.virtual_replicas or self.size
        local_replicas = replicas // self.size
        first = self.rank * local_replicas
        numbers = range(first, first + local_replicas)
        return np.hstack([batches[:, number::replicas] for number in numbers])

    def __post_init__(self) -> None:
        # Narrow NumPy integers would overflow.
        self.rows = _whole("rows", self.rows, least=1)
        self.batch = batch = _whole("batch", self.batch, least=1)
        self.size = size = _whole("size", self.size, least=1)
        self.rank = _whole("rank", self.rank, least=0)
        _whole("seed", self.seed, least=0)
        for name in ("shuffle", "drop_last"):
            choice = getattr(self, name)
            if not isinstance(choice, bool):
                raise TypeError(f"{name} must be True or False, got {choice!r}.")
        if self.rank >= size:
            raise ValueError(
                f"rank must be below size, {size}, got {self.rank}: ranks count from 0."
            )
        if self.virtual_replicas is not None:
            self.virtual_replicas = replicas = _whole(
                "virtual_replicas", self.virtual_replicas, least=1
            )
            if replicas % size:
                raise ValueError(
                    f"virtual_replicas must be a multiple of size, {size}, got {replicas}: each "
                    f"process computes the same number; give {replicas + -replicas % size}."
                )
            if batch % replicas:
                raise ValueError(
                    f"batch must be a multiple of virtual_replicas, {replicas}, got {batch}: each "
                    f"reads the same number of rows; give {batch + -batch % replicas}."
                )
        if batch % size:
            raise ValueError(
                f"batch must be a multiple of size, {size}, got {batch}: it counts the rows of all "
                f"processes, and each reads the same number; give {batch + -batch % size}."
            )
        if self.drop_last and self.rows < batch:
            raise ValueError(
                f"batch must be at most rows, {self.rows}, got {batch}: drop_last=True would drop "
                "the only batch."
            )


def _whole(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}.")
    return int(value)
