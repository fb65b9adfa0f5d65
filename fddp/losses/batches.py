"""A process's batch: rows that are divided among its replicas and micro-batches, whole batches that are not, and either
of them with how much it counts.

Arrays with equal first dims are rows. Anything else (a graph, a packed sequence, a constant beside the rows) is taken
as it is by a single replica with a single micro-batch. For several the user gives one batch for each. These are
stacked: a row is then a whole batch, and every program divides them as it divides rows.

Source: `stack_batches` in Levanter; the leading device dim of a `jax.pmap`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float

from fddp.wording import leaf_name


class Stacked(NamedTuple):
    """Batches that are taken as they are: one for each micro-batch of each replica of this process, in turn.

    Each may be any tree of arrays; all have equal shapes, so pad them. All count alike, unless the loss gives their
    weights (`fddp.Weighted`).

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
    """Batches that are taken as they are, in the form that programs take."""

    rows: Any
    """The batches, stacked along a first dim."""


class Joined(NamedTuple):
    """A batch that counts only in part; `fddp.join` yields them."""

    rows: Any
    """The batch, in a form that a step takes."""
    share: Float[ArrayLike, " rows"]
    """Factor of each row (or batch that is taken as it is) in gradients and loss: 1, or 0 when its rank has run out of
    data."""
    divisor: Float[ArrayLike, " rows"]
    """Factor of each row in the weight by which the sum is divided."""
    leads: Bool[ArrayLike, " rows"] | None = None
    """Marks the row whose replica gives all others its buffers; None: replica 0 does, as without `join`."""


def taken(batch: Any, count: int, *, undivided: bool | None = None) -> Any:
    """Brings a batch into the form that programs take; a batch that has no such form is left as it is.

    Args:
      batch: the user's batch.
      count: replicas of this process × micro-batches.
      undivided: whether earlier batches were taken as they are; None: this is the first one.

    Returns:
      A tree of rows, or an `Undivided`. Any other batch cannot be divided, and `fddp.step.checks` refuses it.
    """
    if isinstance(batch, Joined):
        return batch._replace(rows=taken(batch.rows, count, undivided=undivided))
    if isinstance(batch, Stacked):
        batches = list(batch.batches)
        return _stacked(batches) if len(batches) == count and not unlike(batches) else batch
    as_it_is = not is_rows(batch) if undivided is None else undivided
    alone = as_it_is and count == 1 and jax.tree.leaves(batch) and not lists_of_numbers(batch)
    return _stacked([batch]) if alone else batch


def unjoined(batch: Any) -> Any:
    """A batch without what `fddp.join` says of it."""
    return batch.rows if isinstance(batch, Joined) else batch


def is_rows(batch: Any) -> bool:
    """Whether all arrays of a batch have equally many rows."""
    counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    return len(counts) == 1 and () not in counts


def count_rows(batch: Any) -> int:
    """Counts the rows of a batch: each of `Stacked` batches counts as one row, and so does a batch that is no rows."""
    if isinstance(batch, Stacked):
        return len(batch.batches)
    leaves = jax.tree.leaves(batch)
    return jnp.shape(leaves[0])[0] if leaves and is_rows(batch) else min(1, len(leaves))


def lists_of_numbers(batch: Any) -> list[str]:
    """Finds the paths of Python's lists of numbers in a batch: JAX takes each number for an array of its own."""
    named = jax.tree_util.tree_leaves_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    return [
        leaf_name(path) or "at its top"
        for path, x in named
        if isinstance(x, list) and not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
    ]


def not_numeric(batch: Any) -> list[str]:
    """Finds the leaves of a batch that no program takes: text, dates, objects."""
    rows = batch.rows if isinstance(batch, Undivided) else batch
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    return [f"{leaf_name(path)} {x!r:.40}".strip() for path, x in leaves if not _is_numeric(x)]


def unlike(batches: Sequence[Any]) -> str:
    """Describes the first difference in form of batches that are to be stacked.

    Args:
      batches: trees of arrays.

    Returns:
      The first leaf that differs, and its two forms; "" if none does.
    """
    first = jax.tree_util.tree_leaves_with_path(batches[0]) if batches else []
    for number, batch in enumerate(batches[1:], 1):
        if jax.tree.structure(batch) != jax.tree.structure(batches[0]):
            return f"batch {number} has the structure {jax.tree.structure(batch)}, batch 0 another"
        for (path, x), y in zip(first, jax.tree.leaves(batch)):
            if _form(x) != _form(y):
                name = leaf_name(path) or "the array"
                return f"{name} is {_form(x)} in batch 0 and {_form(y)} in batch {number}"
    return ""


def _stacked(batches: Sequence[Any]) -> Undivided:
    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
        on_host = not any(isinstance(x, jax.Array) for x in leaves)
        if len(leaves) == 1:
            return (np.asarray(leaves[0]) if on_host else leaves[0])[None]
        return np.stack(leaves) if on_host else jnp.stack(leaves)

    return Undivided(jax.tree.map(stack, *batches))


def _form(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _is_numeric(x: Any) -> bool:
    if not hasattr(x, "dtype"):
        return isinstance(x, int | float | complex) or hasattr(x, "__jax_array__")
    return getattr(x.dtype, "kind", "") not in ("U", "S", "O", "M", "m")
