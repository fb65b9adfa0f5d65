"""Detects steps that an optimizer skipped by itself, as in `dynamic_scale` and `optax.MultiSteps`.

A skipped step has trained on no rows. The optimizer's state records it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from fddp.optim.loss_scale import DynamicScaleState, gradients_finite

SKIPPING = (DynamicScaleState, optax.ApplyIfFiniteState, optax.MultiStepsState)


def skipped(opt_state: PyTree, grads: PyTree) -> Bool[Array, ""] | None:
    """True if the update of `grads` that returned `opt_state` skipped them; None if the optimizer
    never skips a step.

    >>> import jax.numpy as jnp, optax
    >>> optimizer, grads = optax.apply_if_finite(optax.sgd(0.1), 5), jnp.array([jnp.nan])
    >>> updates, opt_state = optimizer.update(grads, optimizer.init(grads))
    >>> bool(skipped(opt_state, grads))
    True
    """
    flags = [flag for node in _nodes(opt_state) for flag in _skips(node, grads)]
    return jnp.any(jnp.stack(flags)) if flags else None


def _nodes(tree: PyTree) -> list[Any]:
    """Collects the `SKIPPING` states in a state, nested ones included."""
    outer = [x for x in jax.tree.leaves(tree, is_leaf=_tells) if _tells(x)]
    return [*outer, *(inner for node in outer for inner in _nodes(tuple(node)))]


def _tells(x: Any) -> bool:
    return isinstance(x, SKIPPING)


def _skips(state: Any, grads: PyTree) -> list[Array]:
    if isinstance(state, DynamicScaleState):
        return [~gradients_finite(grads)]
    if isinstance(state, optax.ApplyIfFiniteState):
        return [~jnp.asarray(state.last_finite)]
    # `skip_state` belongs to the `should_skip_update_fn` of MultiSteps; without one it is ().
    flag = state.skip_state.get("should_skip") if isinstance(state.skip_state, Mapping) else None
    return [] if flag is None else [jnp.asarray(flag)]
