"""Reads the numbers that an optimizer records in its state.

Source: `snapshot` and `inject_hyperparams` in optax.
"""

from typing import Any

import optax
from jaxtyping import Array, Float, PyTree

# Fields of the states of `snapshot` and `inject_hyperparams` that hold named numbers. The field is
# checked because a parameter may have the same name as a number.
HOLDERS = ("measurement", "hyperparams")


def recorded(opt_state: PyTree, name: str) -> Float[Array, ""] | None:
    """Finds the number that an optimizer recorded as `name`; None unless exactly one matches.

    The name is a measure of `optax.snapshot` or an argument of `optax.inject_hyperparams`.

    >>> import jax.numpy as jnp, optax
    >>> optimizer = optax.chain(optax.snapshot("grad_norm", optax.tree.norm), optax.sgd(0.1))
    >>> recorded(optimizer.init(jnp.array([3.0, 4.0])), "grad_norm")
    Array(5., dtype=float32)
    """

    def written(path: Any, value: Any) -> bool:
        return (
            getattr(path[-2:][0], "name", None) in HOLDERS and getattr(value, "shape", None) == ()
        )

    matches = optax.tree_utils.tree_get_all_with_path(opt_state, name, written)
    return matches[0][1] if len(matches) == 1 else None
