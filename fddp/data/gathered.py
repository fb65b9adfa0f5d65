"""Gathers unequal numbers of rows from all ranks.

Source: `gather_all_tensors` in torchmetrics; `gather_for_metrics` in Accelerate.
"""

from collections import ChainMap
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.comm import Group, described, nothing_to_compare, verify
from fddp.jax_internals import rows_here
from fddp.runtime import group_of


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

    def find() -> Any:
        return jax.tree_util.tree_map_with_path(_row, tree)

    rows = verify(group, "rows", find, nothing_to_compare)
    treedef = jax.tree.structure(rows)
    arrays = dict(enumerate(map(np.asarray, jax.tree.leaves(tree))))
    gathered = group.all_gather_object(arrays)
    # An array without rows, such as np.array([]), has the form of the other ranks' arrays.
    known = ChainMap(*({k: x for k, x in some.items() if len(x)} for some in (arrays, *gathered)))
    empty = {k: known.get(k, x)[:0] for k, x in arrays.items()}
    forms = treedef.unflatten(_form(x) for x in empty.values())
    verify(group, "rows", lambda: forms, partial(described, "a row of"))
    return treedef.unflatten(
        np.concatenate([x[k] if len(x[k]) else empty[k] for x in gathered]) for k in arrays
    )


def _row(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
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
    return _form(x)


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
