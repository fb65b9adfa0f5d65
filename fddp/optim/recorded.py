"""Reads numbers that an optimizer records in its state.

Source: `snapshot` and `inject_hyperparams` in optax.
"""

from typing import Any

import optax
from jaxtyping import Array, Float

# Fields in which the states of `snapshot` and `inject_hyperparams` hold named numbers. A parameter may have the same
# name as a number, so the field is looked at too.
HOLDERS = ("measurement", "hyperparams")


def recorded(opt_state: Any, name: str) -> Float[Array, ""] | None:
    """Finds a number that an optimizer's state holds under a name.

    Args:
      opt_state: the state of any optax transformation.
      name: name of a measure of `optax.snapshot`, or of an argument of `optax.inject_hyperparams`.

    Returns:
      The number; None if the state has none of this name, or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = optax.chain(optax.snapshot("grad_norm", optax.tree.norm), optax.sgd(0.1))
      >>> recorded(optimizer.init(jnp.array([3.0, 4.0])), "grad_norm")
      Array(5., dtype=float32)
    """

    def written(path: Any, value: Any) -> bool:
        return getattr(path[-2:][0], "name", None) in HOLDERS and getattr(value, "shape", None) == ()

    found = optax.tree_utils.tree_get_all_with_path(opt_state, name, written)
    return found[0][1] if len(found) == 1 else None
