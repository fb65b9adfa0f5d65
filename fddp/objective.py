"""The user's loss in one form, whatever form it was written in, and what one micro-batch adds to a step.

A step is a sum of contributions over micro-batches, over calls since the last synchronization and over replicas,
followed by one division: Σ w·g / Σ w. Everything that is summed (gradients, loss, metrics, the weights themselves) has
the same algebra, so accumulation, `no_sync` and replicas need no formulas of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fddp.program import merge, split


class Sums(NamedTuple):
    """Weighted sums of what micro-batches contribute."""

    grads: Any
    """Σ w·g for each trained leaf of the parameters, in the order of the leaves."""
    weight: Float[Array, ""]
    loss: Float[Array, ""]
    aux: Any


class Pending(NamedTuple):
    """What a replica has gathered since the last synchronization."""

    sums: Any
    """`Sums`, or None at the start: nothing yet."""
    model_state: Any
    """Buffers as this replica's last forward left them."""
    micro_batches: Int[Array, ""]
    """How many micro-batches came since the last synchronization."""


# (params, model_state, rng, batch) -> ((weighted loss, (weight, loss, model_state, aux)))
Objective = Callable[[Any, Any, Any, Any], tuple[Array, tuple[Array, Array, Any, Any]]]


def make_objective(loss_fn: Callable[..., Any], *, has_aux: bool) -> Objective:
    """Brings a loss into the form (params, model_state, rng, batch) → (w·loss, (w, loss, model_state, aux)).

    Args:
      loss_fn: `loss_fn(params, batch)`; called with `model_state=` or `rng=` where the state has them. Returns a loss,
        `(loss, aux)` with `has_aux`, or `(loss, (model_state, aux))` with a model state.
      has_aux: whether the loss returns metrics too.

    Returns:
      The objective; it raises ValueError or TypeError when it is traced and the loss returns something else.
    """

    def objective(params: Any, model_state: Any, rng: Any, batch: Any) -> tuple[Array, tuple[Array, Array, Any, Any]]:
        extra = {"model_state": model_state, "rng": rng}
        value, aux = loss_fn(params, batch, **{name: x for name, x in extra.items() if x is not None}), None
        if has_aux or model_state is not None:
            value, aux = _pair(value, "(loss, (model_state, aux))" if model_state is not None else "(loss, aux)")
        if model_state is not None:
            given, (model_state, aux) = model_state, _pair(aux, "(loss, (model_state, aux))")
            _check_alike(given, model_state)
        loss = _exact(_scalar(value))
        weight = jnp.ones((), loss.dtype)
        return weight * loss, (weight, loss, model_state, _floats(aux))

    return objective


def contribute(
    objective: Objective, chosen: Sequence[int], params: Any, pending: Pending, key: Any, batch: Any
) -> Pending:
    """Adds one micro-batch's gradients, loss and metrics to what is pending.

    Args:
      objective: the loss, from `make_objective`.
      chosen: which leaves of the parameters to take gradients of.
      params: parameters.
      pending: what was gathered so far.
      key: random key of this step, micro-batch and replica, or None.
      batch: rows of one micro-batch.

    Returns:
      What is pending now.
    """
    leaves, treedef = jax.tree.flatten(params)
    trainable, fixed = split(chosen, leaves)

    def loss(trainable: Sequence[Array]) -> tuple[Array, tuple[Array, Array, Any, Any]]:
        return objective(treedef.unflatten(merge(chosen, trainable, fixed)), pending.model_state, key, batch)

    (_, (weight, value, model_state, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
    sums = Sums(tuple(grads), weight, weight * value, jax.tree.map(lambda x: weight.astype(x.dtype) * x, aux))
    return Pending(plus(pending.sums, sums), model_state, pending.micro_batches + 1)


def plus(a: Sums | None, b: Sums) -> Sums:
    """Adds contributions; None is the neutral element."""
    return b if a is None else jax.tree.map(jnp.add, a, b)


def mean(sums: Sums) -> Sums:
    """Divides contributions by their weight."""
    return jax.tree.map(lambda x: x / sums.weight.astype(x.dtype), sums)


def _pair(value: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"the loss must return {form}, got {_shown(value)}.")
    return value


def _check_alike(given: Any, returned: Any) -> None:
    if jax.tree.structure(returned) != jax.tree.structure(given):
        raise ValueError(
            f"the loss must return a model_state of the structure it was given, {jax.tree.structure(given)}, "
            f"got {jax.tree.structure(returned)}."
        )
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(returned)):
        if _shown(old) != _shown(new):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the loss must return model_state{name} as it was given, {_shown(old)}, got {_shown(new)}."
            )


def _scalar(value: Any) -> Array:
    if isinstance(value, tuple):
        raise TypeError(f"the loss must return one number, got a tuple {_shown(value)}; metrics need has_aux=True.")
    if not hasattr(value, "dtype"):
        raise TypeError(f"the loss must be an array computed from params, got {_shown(value)}.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"the loss must be a float, got {_shown(value)}.")
    if value.shape != ():
        raise ValueError(f"the loss must be a scalar, got {_shown(value)}; take its mean over the rows.")
    return value


def _floats(aux: Any) -> Any:
    for path, x in jax.tree_util.tree_leaves_with_path(aux):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(f"aux{name} must be a float to be averaged over replicas, got {_shown(x)}; cast it.")
    return jax.tree.map(_exact, aux)


def _exact(x: Any) -> Array:
    """In float32 at least: sums over many replicas and micro-batches outgrow 16 bits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
