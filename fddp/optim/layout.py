"""What an optimizer's state holds for each parameter, and where that lies on the devices of a replica."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec


def optimizer_laid_out(axes: tuple[str, ...], opt_state: Any, params: Any, where: Any) -> Any:
    """Says to XLA where an optimizer's state is to lie: what has the shape of a parameter, as that parameter.

    Args:
      axes: along which the devices of a replica lie.
      opt_state: of any optax transformation.
      params: the parameters that it trains.
      where: a tree like them, from `specs`.

    Returns:
      The optimizer's state.
    """
    if not axes:
        return opt_state

    def put(x: Any, param: Any, where: PartitionSpec) -> Any:
        if masked(x):
            return x
        return jax.lax.with_sharding_constraint(x, where if jnp.shape(x) == jnp.shape(param) else PartitionSpec())

    return map_state(
        lambda part: jax.tree.map(put, part, params, where, is_leaf=masked),
        lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()),
        params,
        opt_state,
    )


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
