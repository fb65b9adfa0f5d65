"""The leaves of a tree: selects those with a gradient, and recognises donated arrays."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from fddp.jax_internals import given_away


def differentiable(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the leaves that can have a gradient: those of float or complex dtype."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in leaves]
    return tuple(i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact))


def split_leaves(chosen: Sequence[int], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits the leaves into those of `chosen`, in its order, and all others."""
    indices = set(chosen)
    return [leaves[i] for i in chosen], [x for i, x in enumerate(leaves) if i not in indices]


def join_leaves(chosen: Sequence[int], trainable: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """Joins the leaves in their original order: the inverse of `split_leaves`."""
    leaves = list(fixed)
    for index, leaf in sorted(zip(chosen, trainable), key=itemgetter(0)):
        leaves.insert(index, leaf)
    return leaves


def refuse_deleted(state: Any) -> None:
    """Raises a ValueError if an array of a state was donated."""
    if is_used_up(state):
        raise ValueError(
            "this state is used up: a step has reused its memory for the next state. Continue with "
            "the state that the step returned, or create the step with donate=False to use a state "
            "several times. After an interrupted step, continue from the newest checkpoint."
        )


def is_used_up(state: Any) -> bool:
    """Returns True if an array of a state was donated."""
    arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    return any(given_away(x) for x in arrays if not isinstance(x, Tracer))


def with_trained(params: PyTree, trained: PyTree) -> Any:
    """Replaces the trained leaves of `params`; None marks the others."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        [old if new is None else new for old, new in zip(leaves, treedef.flatten_up_to(trained))]
    )
