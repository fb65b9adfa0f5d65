"""Ranks with unequally many batches: those that have run out go on with weight zero until all are done.

Source: `join` in PyTorch's `distributed.py`. There an exhausted rank shadows the others' all-reduces with zeros; here
it runs the same program on its last batch, so collectives inside a loss (cross-replica BatchNorm) go on as well.
Buffers come from the first rank that still has data, as in DDP (`_find_common_rank`).
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import jax
import numpy as np

from fddp.comm import Group
from fddp.jax_internals import rows_here
from fddp.losses import Joined, Stacked, count_rows, is_rows
from fddp.runtime import group_of
from fddp.wording import check_switch

EXHAUSTED: Any = object()


def join(
    batches: Iterable[Any],
    group: Group | None = None,
    *,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[Joined]:
    """Yields this process's batches, and goes on with its last one, at weight zero, until every rank is done.

    Each round costs one small message between the hosts.

    Args:
      batches: this process's batches; at least one.
      group: the replicas that train together; None: the group of `fddp.init()`.
      divide_by_initial_world_size: whether sums are divided by all ranks, so that a row weighs the same in every step;
        False: by those that still have data. The reported loss is divided likewise.
      throw_on_early_termination: whether to end on all ranks as soon as one has run out.

    Returns:
      An iterator over batches for `step(state, batch)`, or `step.no_sync(state, batch)`.

    Raises:
      TypeError: batches cannot be iterated.
      ValueError: on every rank: a rank has no batch at all.
      RuntimeError: on every rank: one has run out, with `throw_on_early_termination`.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state = step.init(jnp.zeros(()))
      >>> for batch in fddp.join([jnp.ones(8), jnp.full(8, 3.0)]):
      ...     state, info = step(state, batch)
      >>> float(state.params)
      3.0
    """
    if not isinstance(batches, Iterable):
        raise TypeError(f"join: batches must be an iterable of this process's batches, got {type(batches).__name__}.")
    check_switch("join: divide_by_initial_world_size", divide_by_initial_world_size)
    check_switch("join: throw_on_early_termination", throw_on_early_termination)
    return _rounds(iter(batches), group_of("join", group), divide_by_initial_world_size, throw_on_early_termination)


def _rounds(batches: Iterator[Any], group: Group, divide_by_all: bool, throw: bool) -> Iterator[Joined]:
    last = None
    most = 0
    divided = True
    for number in count():
        mine = jax.tree.map(rows_here, next(batches, EXHAUSTED))
        active = group.all_gather(np.array(mine is not EXHAUSTED))
        if number and not active.any():
            return
        done = ", ".join(str(rank) for rank in np.flatnonzero(~active))
        if done and number == 0:
            raise ValueError(f"join: no batch at all on rank {done}; give every rank at least one.")
        if done and throw:
            raise RuntimeError(f"join: rank {done} has run out of batches, and throw_on_early_termination is set.")
        last = last if mine is EXHAUSTED else mine
        leads = group.rank == np.argmax(active)
        if number == 0:  # as for a step, the first batch decides whether rows are counted
            divided = isinstance(last, Stacked) or is_rows(last)
        rows = count_rows(last) if divided or isinstance(last, Stacked) else 1
        most = max(most, rows)
        # A rank without data counts with as many rows as it ever had, however few its last batch has.
        counted = 1.0 if mine is not EXHAUSTED else most / rows if divide_by_all and rows else 0.0
        yield _joined(last, rows, mine is not EXHAUSTED, counted, leads)


def _joined(batch: Any, rows: int, active: bool, counted: float, leads: bool) -> Joined:
    leading = np.zeros(rows, bool)
    leading[:1] = leads  # the replica of this process that has the first row leads
    return Joined(batch, np.full(rows, active, np.float32), np.full(rows, counted, np.float32), leading)
