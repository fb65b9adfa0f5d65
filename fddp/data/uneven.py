"""Joins ranks with unequal numbers of batches: exhausted ranks continue with weight 0.

Source: `join` in PyTorch's `distributed.py`, where an exhausted rank joins the other ranks'
all-reduces with zeros. Here it runs the same program on its last batch, so that collectives inside
a loss (cross-replica BatchNorm) continue as well. Buffers are those of the first rank with data, as
in DDP (`_find_common_rank`).
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.jax_internals import rows_here
from fddp.losses import Joined, Stacked, count_rows, is_rows
from fddp.runtime import group_of
from fddp.wording import check_has, check_switch

EXHAUSTED: Any = object()


def join(
    batches: Iterable[Any],
    group: Group | None = None,
    *,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[Joined]:
    """Yields this process's batches, then the last one at weight 0 until all ranks are exhausted.

    Each step costs one small message between the hosts.

    Args:
      batches: this process's batches, at least one.
      group: the replicas that train together; None: the group of `fddp.init()`.
      divide_by_initial_world_size: True: divides sums by the rows of all ranks, so that a row has
        the same weight in every step; False: by those of the ranks with data. The reported loss is
        divided by the same number.
      throw_on_early_termination: True: raises on all ranks as soon as one rank is exhausted.

    Returns:
      An iterator over batches for `step(state, batch)` or `step.no_sync(state, batch)`.

    Raises:
      TypeError: `batches` is not iterable.
      ValueError: a rank has no batch at all; on every rank.
      RuntimeError: a rank is exhausted, with `throw_on_early_termination`; on every rank.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state = step.init(jnp.zeros(()))
      >>> for batch in fddp.join([jnp.ones(8), jnp.full(8, 3.0)]):
      ...     state, info = step(state, batch)
      >>> float(state.params)
      3.0
    """
    kind = "an iterable of this process's batches"
    check_has("__iter__", "join: batches", batches, kind)
    check_switch("join: divide_by_initial_world_size", divide_by_initial_world_size)
    check_switch("join: throw_on_early_termination", throw_on_early_termination)
    return _joined_batches(
        iter(batches),
        group_of("join", group),
        divide_by_initial_world_size,
        throw_on_early_termination,
    )


def _joined_batches(
    batches: Iterator[Any], group: Group, divide_by_all: bool, throw: bool
) -> Iterator[Joined]:
    last = None
    max_rows = 0
    divided = True
    for number in count():
        batch = jax.tree.map(rows_here, next(batches, EXHAUSTED))
        active = group.all_gather(np.array(batch is not EXHAUSTED))
        if number and not active.any():
            return
        exhausted = ", ".join(map(str, np.flatnonzero(~active)))
        if exhausted and number == 0:
            raise ValueError(
                f"join: no batch at all on rank {exhausted}; give every rank at least one."
            )
        if exhausted and throw:
            raise RuntimeError(
                f"join: rank {exhausted} has run out of batches, and throw_on_early_termination is "
                "set."
            )
        runs = batch is not EXHAUSTED
        if runs:
            last = batch
        leads = group.rank == np.argmax(active)
        if number == 0:  # as in a step, the first batch decides whether rows are counted
            divided = isinstance(last, Stacked) or is_rows(last)
        rows = 1
        if divided or isinstance(last, Stacked):
            rows = count_rows(last)
        max_rows = max(max_rows, rows)
        divisor = float(runs)
        if divide_by_all and rows and not runs:
            # An exhausted rank counts its largest batch so far, even if its last one was smaller.
            divisor = max_rows / rows
        yield _joined(last, rows, runs, divisor, leads)


def _joined(batch: PyTree, rows: int, active: bool, divisor: float, leads: bool) -> Joined:
    leading = np.zeros(rows, bool)
    leading[:1] = leads  # the replica with this process's first row leads
    return Joined(
        batch, np.full(rows, active, np.float32), np.full(rows, divisor, np.float32), leading
    )
