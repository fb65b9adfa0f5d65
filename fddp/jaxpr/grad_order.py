"""The ready order of a loss's gradients, for users."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.jax_internals import unbound_axis
from fddp.jaxpr.leaves import differentiable, join_leaves, split_leaves
from fddp.jaxpr.order import ready_order
from fddp.wording import check_has


def grad_order(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> tuple[int, ...]:
    """Finds the order in which the gradients of a loss become ready, from its program.

    Args:
      loss_fn: `loss_fn(params, *args) -> loss` or `-> (loss, aux)`.
      params: tree of arrays or `jax.ShapeDtypeStruct`s.
      *args: the other arguments of the loss, or their shapes.

    Returns:
      Indices of the leaves of `params`, first ready first. Leaves without a gradient (integers)
      are omitted.

    Raises:
      ValueError: the loss has a collective.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["first"]) @ p["second"])
      >>> params = {"first": jnp.ones((3, 3)), "second": jnp.ones((3, 3))}
      >>> grad_order(loss, params, jnp.ones((2, 3)))
      (1, 0)
    """
    check_has("__call__", "grad_order: loss_fn", loss_fn, "a function")
    leaves, treedef = jax.tree.flatten(params)
    chosen = differentiable(leaves)

    def loss(trainable: Sequence[Any], fixed: Sequence[Any], *args: Any) -> Any:
        value = loss_fn(treedef.unflatten(join_leaves(chosen, trainable, fixed)), *args)
        return value[0] if isinstance(value, tuple) else value

    trainable, fixed = split_leaves(chosen, leaves)
    try:
        closed = jax.make_jaxpr(jax.grad(loss))(trainable, fixed, *args)
    except NameError as error:
        if unbound_axis(error) is None:
            raise
        raise ValueError(
            f"grad_order: the loss has a collective ({error}), and no axis is bound here. Pass a "
            "loss without collectives, or read the order from step.plan."
        ) from None
    return tuple(chosen[k] for k in ready_order(closed, len(chosen)))
