"""Where an optimizer's state lies on the devices of a replica."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fddp.optimizer import map_state, masked


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
