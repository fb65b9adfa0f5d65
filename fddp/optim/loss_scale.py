"""Loss scaling: a factor on the loss keeps small float16 gradients from vanishing.

A scale is a weight. A step is Σ w·g / Σ w, the gradients are those of w·loss, and every step ends
with a division. With a scale S in each weight the backward pass runs on S·w·loss, and the division
cancels S. So no code has to unscale anything, and the optimizer, including any clipping, sees plain
gradients.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; `torch.amp.GradScaler`.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from fddp.losses import Evaluated, Objective
from fddp.optim.state_leaves import nodes_of
from fddp.wording import check_has, check_number, check_whole, leaf_name


class DynamicScaleState(NamedTuple):
    """The state of `dynamic_scale`."""

    scale: Float[Array, ""]
    """Factor of the loss in the next step."""
    good_steps: Int[Array, ""]
    """Number of steps with finite gradients since the scale changed."""
    inner: Any
    """State of the wrapped optimizer."""


def dynamic_scale(
    optimizer: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    minimum: float = 2.0**-24,
    maximum: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Adds dynamic loss scaling to an optimizer: the largest scale with finite float16 gradients.

    A step whose mean gradients are not all finite changes only the scale: it divides it by
    `factor`, and `info.skipped` marks the step. `growth_interval` consecutive good steps multiply
    the scale by `factor`. The mean gradients are equal on all ranks, so the decisions are, too.
    Parameters must be float32 (see `mixed_precision`): in float16 small gradients would vanish when
    the scale is divided out. A constant scale needs no such optimizer: return
    `fddp.Weighted(loss, 2.0**15)`. Do the same in `value_and_grad`, which has no optimizer.

    Args:
      optimizer: any optax transformation, including its clipping: clipping before it would hide
        infinite gradients. It sees gradients without the scale.
      initial: first scale. Powers of two are exact in float32.
      growth_interval: number of good steps after which the scale grows.
      factor: factor by which the scale grows and shrinks, more than 1.
      minimum: smallest scale. It may be below 1, since a `Weighted` loss includes a factor already.
      maximum: largest scale.

    Returns:
      The transformation; its state is a `DynamicScaleState`: see `state.opt_state.scale`.

    Raises:
      ValueError: a number is out of range.
      TypeError: a parameter is float16; raised by `init`.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean(w / x), fddp.dynamic_scale(optax.sgd(1.0)))
      >>> state = step.init(jnp.zeros(()))
      >>> for x in (0.0, 1.0):  # the first gradient is infinite
      ...     state, info = step(state, jnp.full(8, x))
      >>> float(state.params), float(state.opt_state.scale)
      (-1.0, 16384.0)
    """
    check_has("init", "dynamic_scale: optimizer", optimizer, "an optax transformation")
    for name, value in (
        ("initial", initial),
        ("factor", factor),
        ("minimum", minimum),
        ("maximum", maximum),
    ):
        check_number(f"dynamic_scale: {name}", value)
    if not 0 < minimum <= initial <= maximum < math.inf:
        raise ValueError(
            "dynamic_scale needs 0 < minimum ≤ initial ≤ maximum, all finite, got "
            f"{minimum=}, {initial=}, {maximum=}."
        )
    if not 1 < factor < math.inf:
        raise ValueError(f"factor must be a finite number above 1, got {factor!r}.")
    check_whole("growth_interval", growth_interval, 1)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> DynamicScaleState:
        _check_params(params)
        return DynamicScaleState(
            jnp.asarray(initial, jnp.float32), jnp.zeros((), jnp.int32), inner.init(params)
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[Any, Any]:
        finite = gradients_finite(updates)
        changes, new_inner = inner.update(updates, state.inner, params, **extra)
        # Minus zero, unlike plus zero, changes no number that it is added to, not even minus zero.
        changes = jax.tree.map(lambda x: jnp.where(finite, x, -jnp.zeros_like(x)), changes)
        inner_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), new_inner, state.inner
        )
        good = jnp.where(finite, state.good_steps + 1, 0)
        due = good >= growth_interval
        grown = jnp.where(due, jnp.minimum(state.scale * factor, maximum), state.scale)
        scale = jnp.where(finite, grown, jnp.maximum(state.scale / factor, minimum))
        return changes, DynamicScaleState(scale, jnp.where(due, 0, good), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def scaled(objective: Objective, opt_state: PyTree) -> Objective:
    """Multiplies the weight of an objective by all scales in an optimizer's state."""
    scale = scale_of(opt_state)

    def objective_times_scale(*args: Any) -> tuple[Array, Evaluated]:
        weighted, value = objective(*args)
        return scale * weighted, value._replace(
            weight=scale * value.weight, divisor=scale * value.divisor
        )

    return objective_times_scale


def scale_of(opt_state: PyTree) -> Any:
    """Product of all scales in an optimizer's state; 1 without any."""
    return math.prod(x.scale for x in nodes_of(DynamicScaleState, opt_state))


def _check_params(params: PyTree) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if getattr(x, "dtype", None) == jnp.float16:
            name = leaf_name(path)
            raise TypeError(
                "dynamic_scale cannot remove its scale from a float16 gradient, and parameter "
                f"{name!r} is float16; keep it in float32 and compute with "
                "fddp.mixed_precision(loss_fn, jnp.float16)."
            )


def gradients_finite(grads: PyTree) -> Bool[Array, ""]:
    """True if all gradients are finite."""
    return reduce(
        jnp.logical_and, (jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)), jnp.bool_(True)
    )
