"""An optimizer's update that leaves alone what a step did not use.

With a zero gradient a parameter would still move by momentum and weight decay; DDP leaves its `.grad` undefined, and
torch's optimizers pass it over. Here the optimizer runs on everything, and what was not used is put back.

Source: `finalize_backward` in PyTorch's reducer.cpp, which keeps `.grad` of globally unused parameters undefined.
"""

from collections.abc import Callable
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
      The parameters and the optimizer's state. What belongs to no single leaf (a count of steps, all of them in one
      vector) always moves on.

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

    def chosen(new: Any, old: Any) -> Any:
        put_back = lambda new, old, n: new if masked(new) else jnp.where(n > 0, new, old)  # noqa: E731
        return jax.tree.map(put_back, new, old, used, is_leaf=masked)

    return chosen(new_params, params), map_state(chosen, lambda new, old: new, params, new_state, opt_state)


def map_state(of_params: Callable[..., Any], of_rest: Callable[..., Any], params: Any, *states: Any) -> Any:
    """Maps over an optimizer's states: apart over what they hold for each parameter, and over the rest.

    `optax.tree_map_params` makes a state of something that is no parameters, at which functions that label parameters
    by their path fail; here a part of a state is known by its structure.

    Args:
      of_params: what to make of parts that are trees like the parameters, or like a part of them: an empty node
        (`masked`) stands where that part of the optimizer is for none.
      of_rest: what to make of any other leaf, a count of steps say.
      params: the parameters.
      *states: one or more, of one optimizer.

    Returns:
      What these make, in the form of the states.
    """

    def like_params(part: Any) -> bool:
        held, form = jax.tree.flatten(part, is_leaf=masked)
        try:
            given = form.flatten_up_to(params)
        except ValueError:
            return False
        alike = all(masked(x) or jax.tree_util.all_leaves([param]) for x, param in zip(held, given))
        # Where a single array is trained every leaf is alike, the count of steps too.
        return alike and (part is not held[0] or masked(part) or jnp.issubdtype(part.dtype, jnp.inexact))

    return jax.tree.map(
        lambda *parts: (of_params if like_params(parts[0]) else of_rest)(*parts), *states, is_leaf=like_params
    )


def masked(x: Any) -> bool:
    """Whether this stands in an optimizer's state for a parameter, or many, that it is not for."""
    return isinstance(x, optax.MaskedNode)
