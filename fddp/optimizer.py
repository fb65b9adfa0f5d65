"""An optimizer's update that leaves alone what a step did not use.

With a zero gradient a parameter would still move by momentum and weight decay; DDP leaves its `.grad` undefined, and
torch's optimizers pass it over. Here the optimizer runs on everything, and what was not used is put back.

Source: `finalize_backward` in PyTorch's reducer.cpp, which keeps `.grad` of globally unused parameters undefined.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def update(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, used: Any = None
) -> tuple[Any, Any]:
    """Updates parameters and optimizer state; those of leaves that nobody used stay as they were, bit for bit.

    Args:
      optimizer: any optax transformation.
      grads: tree like the parameters.
      opt_state: the optimizer's state.
      params: the parameters.
      used: tree like the parameters: how many replicas used each leaf; None: all are used.

    Returns:
      The parameters and the optimizer's state. What belongs to no single leaf (a count of steps) always moves on.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fddp.optimizer import update
      >>> decay, ones = optax.add_decayed_weights(-0.5), {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> params, _ = update(decay, {"a": 0.0, "b": 0.0}, decay.init(ones), ones, used={"a": 2, "b": 0})
      >>> {name: float(x) for name, x in params.items()}
      {'a': 0.5, 'b': 1.0}
    """
    updates, new_state = optimizer.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    if used is None:
        return new_params, new_state
    marks = optax.tree_map_params(
        optimizer,
        # A part of the optimizer that is not for a leaf holds an empty node in its place.
        lambda x, n: x if _masked(x) else n,
        opt_state,
        used,
        transform_non_params=lambda _: 1,
        is_leaf=_masked,
    )
    return jax.tree.map(_choose, used, new_params, params), jax.tree.map(_choose, marks, new_state, opt_state)


def _choose(used: Any, new: Any, old: Any) -> Any:
    return jnp.where(used > 0, new, old)


def _masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
