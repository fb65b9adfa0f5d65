"""The state of hooks, such as a residual, for each trained leaf."""

from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.comm import add_replica_dim
from fddp.step.replica import Replica


def first_hook_state(replica: Replica, params: PyTree) -> Any:
    """Makes one replica's initial hook state for each trained leaf, or () without state."""
    if replica.options.hook is None:
        return ()
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), replica.trained(params))
    memory = jax.tree.map(replica.options.hook.init, forms)
    if not jax.tree.leaves(memory):
        return ()
    return add_replica_dim(memory)


def hook_state_form(replica: Replica, params: PyTree) -> Any:
    """Returns shapes and dtypes of the hook state of all replicas."""
    share = replica.group.placement.replicas_in_array
    forms = jax.eval_shape(partial(first_hook_state, replica), params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((share, *x.shape[1:]), x.dtype), forms)
