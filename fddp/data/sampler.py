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

from collections.abc import Iterator
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
    # Whole numbers of Python: narrow NumPy integers would overflow.
    rows = check_whole("rows", rows, 1)
    batch = check_whole("batch", batch, 1)
    size = check_whole("size", size, 1)
    rank = check_whole("rank", rank, 0)
    seed = check_whole("seed", seed, 0)
    start = check_whole("start_step", start_step, 0)
    if virtual_replicas is not None:
        virtual_replicas = check_whole("virtual_replicas", virtual_replicas, 1)
    check_switch("shuffle", shuffle)
    check_switch("drop_last", drop_last)
    _check_division(rows, batch, rank, size, drop_last, virtual_replicas)
    steps = rows // batch if drop_last else -(-rows // batch)  # of an epoch
    replicas = virtual_replicas or size
    local_replicas = replicas // size
    first_replica = rank * local_replicas

    def positions(step: int) -> Int[np.ndarray, " local"]:
        """Returns the positions in an epoch that the process reads in a step."""
        all_positions = np.arange(step * batch, (step + 1) * batch) % rows
        each = all_positions.reshape(-1, replicas).T
        return each[first_replica : first_replica + local_replicas].ravel()

    def walk() -> Iterator[Int[np.ndarray, " local"]]:
        first_epoch, first_step = divmod(start, steps)
        for epoch in count(first_epoch):
            if shuffle:
                order = np.arange(rows, dtype=np.uint32 if rows <= 1 << 32 else np.int64)
                # Unlike PyTorch's seed + epoch: its epoch 1 of seed 0 is epoch 0 of seed 1.
                np.random.default_rng([seed, epoch]).shuffle(order)
                for step in range(first_step, steps):
                    yield order[positions(step)].astype(np.int64)
                del order  # before the next epoch's is drawn
            else:
                yield from map(positions, range(first_step, steps))
            first_step = 0

    return walk()  # not a generator itself: the arguments are checked before the first step


def _check_division(
    rows: int, batch: int, rank: int, size: int, drop_last: bool, replicas: int | None
) -> None:
    if rank >= size:
        raise ValueError(f"rank must be below size, {size}, got {rank}: ranks count from 0.")
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
    if drop_last and rows < batch:
        raise ValueError(
            f"batch must be at most rows, {rows}, got {batch}: drop_last=True would drop the "
            "only batch."
        )
