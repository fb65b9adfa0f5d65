"""Ranks with unequal numbers of batches, which continue with weight 0, or of rows to gather.

Source: `join` in PyTorch's `distributed.py`, where an exhausted rank joins the other ranks'
all-reduces with zeros. Here it runs the same program on its last batch, so that collectives inside
a loss (cross-replica BatchNorm) continue as well. Buffers are those of the first rank with data, as
in DDP (`_find_common_rank`). `gather_all_tensors` in torchmetrics; `gather_for_metrics` in
Accelerate.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.comm import Group, described, nothing_to_compare, verify
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
        runs = bool(active[group.rank])
        if runs:
            last = batch
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
        leading = np.zeros(rows, bool)
        # The replica with the first row of the first rank with data leads.
        leading[:1] = group.rank == np.argmax(active)
        weights, divisors = (np.full(rows, x, np.float32) for x in (runs, divisor))
        yield Joined(last, weights, divisors, leading)


def gather_rows(tree: PyTree, *, group: Group | None = None) -> Any:
    """Concatenates the rows of all ranks, in order of rank, on every rank; every rank calls it.

    Args:
      tree: arrays of rows along the first dim, for example predictions. Structure, dtypes and other
        dims are equal on all ranks; the number of rows may differ. Without rows dtype and other
        dims do not count: np.array([]) will do.
      group: the ranks that gather; None: the group of `fddp.init()`.

    Returns:
      The tree with the rows of all ranks, as NumPy arrays.

    Raises:
      ValueError: the shapes or dtypes of a row differ between ranks, or an array has no dims; on
        every rank.
      TypeError: a leaf is not an array of numbers; on every rank.

    Example:
      >>> import fddp, numpy as np
      >>> fddp.gather_rows({"row": np.arange(3)})
      {'row': array([0, 1, 2])}
    """
    group = group_of("gather_rows", group)
    tree = jax.tree.map(rows_here, tree)
    check = partial(jax.tree_util.tree_map_with_path, _check_rows, tree)
    verify(group, "rows", check, nothing_to_compare)
    leaves, treedef = jax.tree.flatten(tree)
    arrays = dict(enumerate(map(np.asarray, leaves)))
    gathered = group.all_gather_object(arrays)
    # An array without rows, such as np.array([]), has the form of the other ranks' arrays.
    known = ChainMap(*({k: x for k, x in some.items() if len(x)} for some in (arrays, *gathered)))
    empty = {k: known.get(k, x)[:0] for k, x in arrays.items()}
    forms = treedef.unflatten(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in empty.values())
    verify(group, "rows", lambda: forms, partial(described, "a row of"))
    return treedef.unflatten(
        np.concatenate([x[k] if len(x[k]) else empty[k] for x in gathered]) for k in arrays
    )


def _check_rows(path: tuple[Any, ...], x: Any) -> None:
    name = f"the array{jax.tree_util.keystr(path)}"
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind in "OSU":
        raise TypeError(
            f"fddp.gather_rows: {name} must be an array of numbers, got "
            f"{dtype or type(x).__name__}."
        )
    if not x.shape:
        raise ValueError(
            f"fddp.gather_rows: {name} has no dims, and rows lie along the first: give x[None]."
        )
