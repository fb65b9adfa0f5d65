"""The leaves of a tree: those that can have a gradient, apart from the rest and together again."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def differentiable(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Which leaves can have a gradient: those of float or complex dtype."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in leaves]
    return tuple(i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact))


def split(chosen: Sequence[int], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Parts the leaves into the chosen ones and the rest."""
    inside = set(chosen)
    return [leaves[i] for i in chosen], [x for i, x in enumerate(leaves) if i not in inside]


def merge(chosen: Sequence[int], trainable: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """Puts the leaves back in their places: the inverse of `split`."""
    inside, rest = dict(zip(chosen, trainable)), iter(fixed)
    return [inside[i] if i in inside else next(rest) for i in range(len(trainable) + len(fixed))]
