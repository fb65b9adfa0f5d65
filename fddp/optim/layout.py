"""The layout of an optimizer's state: its values for each parameter, and their place on the devices of a replica."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec


def optimizer_laid_out(axes: tuple[str, ...], opt_state: Any, params: Any, where: Any) -> Any:
    """Tells XLA where an optimizer's state is to lie: a value of its parameter's shape lies as the parameter does.

    Args:
      axes: mesh axes along which the devices of a replica lie.
      opt_state: the state of any optax transformation.
      params: the parameters that it trains.
      where: a tree of specs like the parameters, from `fddp.comm.specs`.

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
    """Maps one function over parts of an optimizer's states that are like the parameters, and another over the rest.

    `optax.tree_map_params` makes a state of placeholders in place of parameters. Functions that label parameters by
    their path fail on these. So here a part of a state is known by its structure.

    Args:
      of_params: maps parts that are trees like the parameters, or like a part of them: an empty node (`masked`) stands
        where that part of the optimizer trains no parameter.
      of_rest: maps any other leaf, a count of steps say.
      params: the parameters.
      *states: one or more states of one optimizer.

    Returns:
      The results, in the structure of the states.
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
    """Whether a node of an optimizer's state stands for parameters that the optimizer does not train."""
    return isinstance(x, optax.MaskedNode)
