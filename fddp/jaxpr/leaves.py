"""The leaves of a tree: splits off those that can have a gradient, joins them again, and finds donated ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fddp.jax_internals import given_away


def differentiable(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of the leaves that can have a gradient: those of float or complex dtype."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in leaves]
    return tuple(i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact))


def split(chosen: Sequence[int], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits the leaves into the chosen ones and the rest."""
    inside = set(chosen)
    return [leaves[i] for i in chosen], [x for i, x in enumerate(leaves) if i not in inside]


def merge(chosen: Sequence[int], trainable: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """Puts the leaves back in their places: the inverse of `split`."""
    inside = dict(zip(chosen, trainable))
    rest = iter(fixed)
    return [inside[i] if i in inside else next(rest) for i in range(len(trainable) + len(fixed))]


def refuse_deleted(state: Any) -> None:
    """Refuses a state whose memory was donated: where a process has several devices JAX would crash or wait for ever.

    Args:
      state: the state that a step was given.

    Raises:
      ValueError: an array of it was donated.
    """
    if is_used_up(state):
        raise used_up()


def is_used_up(state: Any) -> bool:
    """Whether one of a state's arrays was donated."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    return any(map(given_away, arrays))


def used_up() -> ValueError:
    """Makes the error of a step that is given a donated state."""
    return ValueError(
        "this state is used up: a step that was given it has used its memory for the next one. Go on with the state "
        "that the step returned, or make the step with donate=False to use a state several times. After a step that "
        "was interrupted, go on from the newest checkpoint."
    )
