"""Reads an optimizer's state: the numbers that it records, and the steps that it skipped.

A step that an optimizer skips by itself, as in `dynamic_scale` and `optax.MultiSteps`, has trained
on no rows.

Source: `snapshot` and `inject_hyperparams` in optax.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from fddp.optim.loss_scale import DynamicScaleState, gradients_finite
from fddp.optim.state_leaves import nodes_of

# Fields of the states of `snapshot` and `inject_hyperparams` that hold named numbers. The field is
# checked because a parameter may have the same name as a number.
HOLDERS = ("measurement", "hyperparams")
SKIPPING = (DynamicScaleState, optax.ApplyIfFiniteState, optax.MultiStepsState)


def recorded(opt_state: PyTree, name: str) -> Float[Array, ""] | None:
    """Finds the number that an optimizer recorded as `name`; None unless exactly one matches."""

    def written(path: Any, value: Any) -> bool:
        return (
            getattr(path[-2:][0], "name", None) in HOLDERS and getattr(value, "shape", None) == ()
        )

    matches = optax.tree_utils.tree_get_all_with_path(opt_state, name, written)
    if len(matches) != 1:
        return None
    return matches[0][1]


def skipped(opt_state: PyTree, grads: PyTree) -> Bool[Array, ""] | None:
    """True if the update from `grads` to `opt_state` skipped a step; None if it never does."""
    flags = [flag for node in _nodes(opt_state) for flag in _skips(node, grads)]
    if not flags:
        return None
    return jnp.any(jnp.stack(flags))


def _nodes(tree: PyTree) -> list[Any]:
    """Collects the `SKIPPING` states in a state, nested ones included."""
    outer = nodes_of(SKIPPING, tree)
    return [*outer, *(inner for node in outer for inner in _nodes(tuple(node)))]


def _skips(state: Any, grads: PyTree) -> list[Array]:
    if isinstance(state, DynamicScaleState):
        return [~gradients_finite(grads)]
    if isinstance(state, optax.ApplyIfFiniteState):
        return [~jnp.asarray(state.last_finite)]
    # `skip_state` belongs to the `should_skip_update_fn` of MultiSteps; without one it is ().
    if isinstance(state.skip_state, Mapping) and state.skip_state.get("should_skip") is not None:
        return [jnp.asarray(state.skip_state["should_skip"])]
    return []
