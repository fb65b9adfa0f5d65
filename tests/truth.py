"""The truth for trainings: plain JAX on one device, without fddp, on joined batches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any, Any], jax.Array]


class Trained(NamedTuple):
    """The end of a training, and its steps."""

    params: Any
    opt_state: Any
    losses: list[jax.Array]
    """The loss of each step, before its update."""
    history: list[Any]
    """The parameters after each step."""


def by_plain_jax(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    params: Any,
    batches: Iterable[Any],
    *,
    parts: int = 1,
) -> Trained:
    """Trains with the loop of optax's documentation.

    Args:
      loss: `loss(params, batch)`, a scalar.
      optimizer: receives the loss as `value` and the gradients as `grad` if it takes extra
        arguments.
      params: the first parameters.
      batches: the joined batch of each step.
      parts: how many equal parts of the rows, such as micro-batches, a step takes the mean loss of.

    Returns:
      The parameters and the optimizer's state after the last step, and the losses of all steps.
    """
    # A program of its own for each call: arrays of NumPy that a loss closes over are constants of
    # the program, which JAX remembers, while the program lives, in the precision that was set.
    step = jax.jit(partial(_step, loss, optimizer, parts))
    params = jax.tree.map(jnp.asarray, params)
    opt_state = optimizer.init(params)
    losses = list[jax.Array]()
    history = list[Any]()
    for batch in batches:
        value, params, opt_state = step(params, opt_state, batch)
        losses.append(value)
        history.append(params)
    return Trained(params, opt_state, losses, history)


def _step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    parts: int,
    params: Any,
    opt_state: Any,
    batch: Any,
) -> tuple[jax.Array, Any, Any]:
    value, grads = jax.value_and_grad(partial(_mean, loss, parts))(params, batch)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, opt_state, params, value=value, grad=grads)
    return value, optax.apply_updates(params, updates), opt_state


def _mean(loss: Loss, parts: int, params: Any, batch: Any) -> jax.Array:
    rows = [jax.tree.map(lambda x, k=k: jnp.split(x, parts)[k], batch) for k in range(parts)]
    return jnp.mean(jnp.stack([loss(params, part) for part in rows]))
