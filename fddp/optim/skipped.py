"""Finds steps whose gradients an optimizer has skipped by itself, as `dynamic_scale` and `optax.apply_if_finite` do.

Their states tell that they did. A skipped step has trained on nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from fddp.optim.loss_scale import DynamicScaleState, all_finite

SKIPPING = (DynamicScaleState, optax.ApplyIfFiniteState, optax.MultiStepsState)


def skipped(opt_state: Any, grads: Any) -> Bool[Array, ""] | None:
    """Tells whether an optimizer skipped the gradients of the step that made its state.

    Args:
      opt_state: the state that its update returned.
      grads: the gradients that the update was given.

    Returns:
      Whether it did; None where nothing in the optimizer ever skips a step.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer, grads = optax.apply_if_finite(optax.sgd(0.1), 5), jnp.array([jnp.nan])
      >>> updates, opt_state = optimizer.update(grads, optimizer.init(grads))
      >>> bool(skipped(opt_state, grads))
      True
    """
    found = [one for node in _nodes(opt_state) for one in _skips(node, grads)]
    return jnp.any(jnp.stack(found)) if found else None


def _nodes(tree: Any) -> list[Any]:
    """The states in a state that may tell of a skipped step, those inside others too."""
    outer = [x for x in jax.tree.leaves(tree, is_leaf=_tells) if _tells(x)]
    return [*outer, *(inner for node in outer for inner in _nodes(tuple(node)))]


def _tells(x: Any) -> bool:
    return isinstance(x, SKIPPING)


def _skips(state: Any, grads: Any) -> list[Array]:
    if isinstance(state, DynamicScaleState):
        return [~all_finite(grads)]
    if isinstance(state, optax.ApplyIfFiniteState):
        return [~jnp.asarray(state.last_finite)]
    # `skip_state` is that of MultiSteps' `should_skip_update_fn`; without such a function it is ().
    told = state.skip_state.get("should_skip") if isinstance(state.skip_state, Mapping) else None
    return [] if told is None else [jnp.asarray(told)]
