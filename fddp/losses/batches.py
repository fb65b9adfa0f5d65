"""The batch of a process: rows that replicas and micro-batches divide, or undivided batches.

Arrays with equal first dims are rows. Any other tree (a graph, a packed sequence, rows with a
constant) is undivided. A single replica with a single micro-batch takes one undivided batch.
Otherwise the user passes one for each micro-batch of each replica. They are stacked: each row is a
whole batch, and programs divide the stack like any rows.

Source: `stack_batches` in Levanter; the leading device dim of a `jax.pmap`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, PyTree

from fddp.wording import leaf_name


class Stacked(NamedTuple):
    """Undivided batches of a process, one per micro-batch, replica by replica.

    Each is a tree of arrays. All have equal shapes, so pad them. They count equally, unless the
    loss returns weights (`fddp.Weighted`).

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, graph: jnp.mean((w * graph["nodes"] - graph["scale"]) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.5), accumulation_steps=2)
      >>> graphs = [{"nodes": jnp.ones(3), "scale": float(k)} for k in range(2 * step.group.size)]
      >>> state, info = step(step.init(jnp.zeros(())), fddp.Stacked(graphs))
    """

    batches: Sequence[Any]
    """The batches, trees of arrays."""


class Undivided(NamedTuple):
    """Undivided batches in the form that programs take."""

    rows: Any
    """The batches, stacked along a first dim."""


class Joined(NamedTuple):
    """A batch from `fddp.join`, with factors for its rows."""

    rows: Any
    """The batch, in a form that a step takes."""
    share: Float[ArrayLike, " rows"]
    """Factor of each row (or undivided batch) in gradients and loss: 1, or 0 if its rank has run
    out of data."""
    divisor: Float[ArrayLike, " rows"]
    """Factor of each row in the weight that divides the sum."""
    leads: Bool[ArrayLike, " rows"] | None = None
    """Marks the row whose replica broadcasts its buffers. None: replica 0 does, as without
    `join`."""


def rows_of_batch(batch: PyTree, count: int, *, undivided: bool | None = None) -> Any:
    """Converts a batch to rows, or to an `Undivided`, for `count` micro-batches in this process.

    `undivided` is True if earlier batches were undivided, None for the first batch. A batch that
    fits neither form is returned unchanged; `fddp.step.checks` refuses it.
    """
    if isinstance(batch, Joined):
        return batch._replace(rows=rows_of_batch(batch.rows, count, undivided=undivided))
    if isinstance(batch, Stacked):
        batches = list(batch.batches) if hasattr(batch.batches, "__iter__") else []
        if len(batches) == count and not unlike(batches):
            return _stacked(batches)
        return batch
    if undivided is None:
        undivided = not is_rows(batch)
    if undivided and count == 1 and jax.tree.leaves(batch) and not lists_of_numbers(batch):
        return _stacked([batch])
    return batch


def unjoined(batch: PyTree) -> Any:
    """Returns a batch without the factors of `fddp.join`."""
    if isinstance(batch, Joined):
        return batch.rows
    return batch


def is_rows(batch: PyTree) -> bool:
    """True if all arrays of a batch have equally many rows."""
    counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    return len(counts) == 1 and () not in counts


def count_rows(batch: PyTree) -> int:
    """Counts the rows of a batch; an undivided batch counts as one row."""
    if isinstance(batch, Stacked):
        return len(batch.batches)
    leaves = jax.tree.leaves(batch)
    if leaves and is_rows(batch):
        return jnp.shape(leaves[0])[0]
    return min(1, len(leaves))


def lists_of_numbers(batch: PyTree) -> list[str]:
    """Returns the paths of lists of numbers in a batch: JAX would take each number for an array."""
    named = jax.tree_util.tree_leaves_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    return [
        leaf_name(path) or "at its top"
        for path, x in named
        if isinstance(x, list) and not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
    ]


def not_numeric(batch: PyTree) -> list[str]:
    """Returns the names of leaves that no program takes: text, objects, foreign tensors, Refs."""
    if isinstance(batch, Undivided):
        batch = batch.rows
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return [
        f"{leaf_name(path)} {x!r:.40} {getattr(x, 'dtype', '')}".strip()
        for path, x in leaves
        if not _is_numeric(x)
    ]


def unlike(batches: Sequence[PyTree]) -> str:
    """Describes the first difference in structure, shape or dtype between batches; "" if none."""
    for number, batch in enumerate(batches[1:], 1):
        if jax.tree.structure(batch) != jax.tree.structure(batches[0]):
            return f"batch {number} has the structure {jax.tree.structure(batch)}, batch 0 another"
        first = jax.tree_util.tree_leaves_with_path(batches[0])
        for (path, x), y in zip(first, jax.tree.leaves(batch)):
            if _form(x) != _form(y):
                name = leaf_name(path) or "the array"
                return f"{name} is {_form(x)} in batch 0 and {_form(y)} in batch {number}"
    return ""


def _stacked(batches: Sequence[PyTree]) -> Undivided:
    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
        on_host = not any(isinstance(x, jax.Array) for x in leaves)
        if len(leaves) == 1 and on_host:
            return np.asarray(leaves[0])[None]
        if len(leaves) == 1:
            return leaves[0][None]
        if on_host:
            return np.stack(leaves)
        return jnp.stack(leaves)

    return Undivided(jax.tree.map(stack, *batches))


def _form(x: ArrayLike) -> str:
    dtype = jnp.result_type(x) if _is_numeric(x) else type(x).__name__
    return f"{dtype}{list(np.shape(x))}"


def _is_numeric(x: Any) -> bool:
    if isinstance(x, jax.Ref):
        return False
    try:
        jax.typeof(x)
    except (TypeError, ValueError):  # of a masked array
        return hasattr(x, "__jax_array__")
    return True
