"""Micro-batches: a replica's rows in k parts, whose contributions add up.

The first k − 1 run in a loop; the last stands outside it, because its backward pass is the one that traffic can hide
behind, and an all-reduce inside a loop would be one per round.

Source: `no_sync` in PyTorch's `distributed.py`, paper section 3.2.4, without k calls.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fddp.objective import Pending


def accumulate(add: Callable[[Pending, Any], Pending], pending: Pending, rows: Any, steps: int) -> Pending:
    """Adds a replica's rows to what is pending, in equal micro-batches.

    Args:
      add: adds one micro-batch.
      pending: where to begin, its `sums` None.
      rows: tree of arrays whose first dim is divisible by `steps`.
      steps: number of micro-batches k, at least 1.

    Returns:
      The sums of these rows, and the buffers and the count after them.
    """
    parts = jax.tree.map(lambda x: x.reshape(steps, x.shape[0] // steps, *x.shape[1:]), rows)
    first, last = jax.tree.map(lambda x: x[:-1], parts), jax.tree.map(lambda x: x[-1], parts)
    if steps > 1:
        start = _from_zero(add, pending, last)
        pending, _ = jax.lax.scan(lambda carried, part: (add(carried, part), None), start, first)
    return add(pending, last)


def _from_zero(add: Callable[[Pending, Any], Pending], pending: Pending, part: Any) -> Pending:
    """A loop carries arrays from its start on: zeros for nothing."""
    shapes = jax.eval_shape(add, pending, part)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.sums)
    return pending._replace(sums=zeros)
