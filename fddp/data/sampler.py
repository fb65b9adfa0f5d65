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
from itertools import count

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
    steps = _steps_per_epoch(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)

    def walk() -> Iterator[Int[np.ndarray, " local"]]:
        first_epoch, first_step = divmod(start, steps)
        for epoch in count(first_epoch):
            numbers = epoch_samples(
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
            yield from numbers[first_step:] if epoch == first_epoch else numbers

    return walk()  # not a generator itself, which would check its arguments at the first step only


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
    """Returns the numbers of the rows that one process reads in an epoch; see `samples`.

    >>> epoch_samples(8, 4, 0, rank=1, size=2, shuffle=False)
    array([[1, 3],
           [5, 7]])
    """
    epoch = _whole("epoch", epoch, least=0)
    steps = _steps_per_epoch(rows, batch, rank, size, seed, shuffle, drop_last, virtual_replicas)
    # Narrow NumPy integers would overflow.
    rows, batch, rank, size = map(int, (rows, batch, rank, size))
    # Unlike PyTorch's seed + epoch: its epoch 1 of seed 0 is epoch 0 of seed 1.
    order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
    # np.resize cuts, or repeats from the front.
    batches = np.resize(order, (steps, batch))
    replicas = virtual_replicas or size
    local_replicas = replicas // size
    return np.hstack(
        [
            batches[:, number::replicas]
            for number in range(rank * local_replicas, (rank + 1) * local_replicas)
        ]
    )


def _steps_per_epoch(
    rows: object,
    batch: object,
    rank: object,
    size: object,
    seed: object,
    shuffle: object,
    drop_last: object,
    virtual_replicas: object,
) -> int:
    """Checks the arguments, and returns the number of batches of an epoch."""
    rows, batch, size = (
        _whole(*argument, least=1)
        for argument in (("rows", rows), ("batch", batch), ("size", size))
    )
    rank = _whole("rank", rank, least=0)
    _whole("seed", seed, least=0)
    for name, choice in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(choice, bool):
            raise TypeError(f"{name} must be True or False, got {choice!r}.")
    if rank >= size:
        raise ValueError(f"rank must be below size, {size}, got {rank}: ranks count from 0.")
    replicas = (
        size if virtual_replicas is None else _whole("virtual_replicas", virtual_replicas, least=1)
    )
    if replicas % size:
        raise ValueError(
            f"virtual_replicas must be a multiple of size, {size}, got {replicas}: each process "
            f"computes the same number; give {replicas + -replicas % size}."
        )
    if batch % replicas and virtual_replicas is not None:
        raise ValueError(
            f"batch must be a multiple of virtual_replicas, {replicas}, got {batch}: each reads "
            f"the same number of rows; give {batch + -batch % replicas}."
        )
    if batch % size:
        raise ValueError(
            f"batch must be a multiple of size, {size}, got {batch}: it counts the rows of all "
            f"processes, and each reads the same number; give {batch + -batch % size}."
        )
    if drop_last and rows < batch:
        raise ValueError(
            f"batch must be at most rows, {rows}, got {batch}: drop_last=True would drop the only "
            "batch."
        )
    return rows // batch if drop_last else -(-rows // batch)


def _whole(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}.")
    return int(value)
