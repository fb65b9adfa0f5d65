"""Deals rows out to processes: an epoch is one permutation, dealt out batch by batch.

The order depends on the seed and the epoch alone, so nobody has to agree on it, keep it or send it: every process finds
the same permutation and takes its own part of each batch. A step reads the same rows on any number of processes, and
any step can be computed without those before it, which is all that a restart needs.

Batches are always full, as a step is compiled for one shape: an epoch that does not end with a batch is padded, or cut.

Source: `DistributedSampler` in torch.utils.data.distributed, which pads to the number of replicas instead.
"""

from collections.abc import Iterator
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
    """The rows that one process reads, step by step and epoch after epoch, without end.

    All processes together read the same rows in a step, whatever their number: a training may go on with fewer or more
    of them, with the same `batch` and the step at which it stopped as `start_step`.

    Args:
      rows: how many rows the data has.
      batch: rows a step, over all processes.
      rank: this process, `group.rank`.
      size: the number of processes, `group.processes`; each brings the rows of all its devices.
      seed: decides the order, together with the epoch; the same on all processes.
      shuffle: whether an epoch is a permutation; else it is 0, 1, 2, …
      drop_last: whether rows that do not fill a batch are left out of their epoch; else the epoch's first rows are
        read once more to fill it, as often as it takes.
      virtual_replicas: the step's, if it has them: each reads the same rows, in the same order, on any number of
        processes. None: as many as there are processes.
      start_step: the step to begin with; the steps before it cost nothing.

    Returns:
      An iterator over steps; each item holds the numbers of `batch // size` rows.

    Raises:
      ValueError: a value out of its range, `batch` is no multiple of `size`, or `drop_last` would leave no batch. All
        of this is found here, before the first step.
      TypeError: a number that is not whole, or a choice that is neither True nor False.

    Example:
      >>> steps = samples(5, 4, rank=1, size=2, shuffle=False)
      >>> [next(steps).tolist() for _ in range(3)]
      [[1, 3], [0, 2], [1, 3]]
    """
    start = _whole("start_step", start_step, least=0)
    steps = _steps_per_epoch(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)

    def walk() -> Iterator[Int[np.ndarray, " local"]]:
        first, done = divmod(start, steps)
        for epoch in count(first):
            share = epoch_samples(
                rows,
                batch,
                epoch,
                rank=rank,
                size=size,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                virtual_replicas=virtual_replicas,
            )
            yield from share[done:] if epoch == first else share

    return walk()  # not a generator itself: that would check nothing until its first step


def epoch_samples(
    rows: int,
    batch: int,
    epoch: int,
    *,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    virtual_replicas: int | None = None,
) -> Int[np.ndarray, "steps local"]:
    """The rows that one process reads in one epoch.

    Args:
      rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas: as for `samples`.
      epoch: which one, from 0 on.

    Returns:
      The numbers of its rows, one line a step.

    Raises:
      ValueError, TypeError: as for `samples`.

    Example:
      >>> epoch_samples(8, 4, 0, rank=1, size=2, shuffle=False)
      array([[1, 3],
             [5, 7]])
    """
    epoch = _whole("epoch", epoch, least=0)
    steps = _steps_per_epoch(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)
    rows, batch, rank, size = map(int, (rows, batch, rank, size))  # narrow numbers of NumPy's overflow
    # Not seed + epoch, as torch has it: there, epoch 1 of seed 0 is epoch 0 of seed 1.
    order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
    # np.resize cuts, or begins again at the front as often as it takes.
    dealt = np.resize(order, (steps, batch))
    replicas = virtual_replicas or size
    each = replicas // size
    return np.hstack([dealt[:, number::replicas] for number in range(rank * each, (rank + 1) * each)])


def _steps_per_epoch(
    rows: Any, batch: Any, rank: Any, size: Any, seed: Any, shuffle: Any, drop_last: Any, virtual_replicas: Any
) -> int:
    """Checks the arguments; returns how many batches they make of an epoch."""
    rows, batch, size = (_whole(*given, least=1) for given in (("rows", rows), ("batch", batch), ("size", size)))
    rank = _whole("rank", rank, least=0)
    _whole("seed", seed, least=0)
    for name, choice in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(choice, bool):
            raise TypeError(f"{name} must be True or False, got {choice!r}.")
    if rank >= size:
        raise ValueError(f"rank must be below size, {size}, got {rank}: ranks count from 0.")
    replicas = size if virtual_replicas is None else _whole("virtual_replicas", virtual_replicas, least=1)
    if replicas % size:
        raise ValueError(
            f"virtual_replicas must be a multiple of size, {size}, got {replicas}: each process stands for equally "
            f"many; give {replicas + -replicas % size}."
        )
    if batch % replicas and virtual_replicas is not None:
        raise ValueError(
            f"batch must be a multiple of virtual_replicas, {replicas}, got {batch}: each reads equally many rows; "
            f"give {batch + -batch % replicas}."
        )
    if batch % size:
        raise ValueError(
            f"batch must be a multiple of size, {size}, got {batch}: it counts the rows of all processes, and each "
            f"reads equally many; give {batch + -batch % size}."
        )
    if drop_last and rows < batch:
        raise ValueError(f"batch must be at most rows, {rows}, got {batch}: drop_last=True would drop the only batch.")
    return rows // batch if drop_last else -(-rows // batch)


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}.")
    return int(value)
