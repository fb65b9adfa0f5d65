"""Loss scaling: losses are multiplied before the backward pass, so that small gradients do not vanish in float16.

A scale is a weight. A step is Σ w·g / Σ w, the gradients are those of w·loss, and every step ends with a division. With
a scale S in each weight the backward pass runs on S·w·loss, and the division takes S out again. So no code has to
unscale anything, and the optimizer, with any clipping in it, sees plain gradients.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; `torch.amp.GradScaler`.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fddp.losses import Objective, Value
from fddp.wording import check_has, check_number, check_whole, leaf_name


class DynamicScaleState(NamedTuple):
    """The state of `dynamic_scale`."""

    scale: Float[Array, ""]
    """Factor of the next step's loss."""
    good_steps: Int[Array, ""]
    """Steps with finite gradients since the scale changed."""
    inner: Any
    """State of the optimizer itself."""


def dynamic_scale(
    optimizer: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    minimum: float = 2.0**-24,
    maximum: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer whose `train_step` scales the loss, as far as float16 gradients stay finite.

    A step whose mean gradients are not all finite changes only the scale, which it divides by
    `factor`; `info.skipped` marks it. `growth_interval` good steps in a row multiply the scale by
    `factor`. The gradients are the same on all ranks, so all ranks do the same. Parameters belong
    in float32 (see `mixed_precision`): divided by the scale again, small
    gradients would vanish in float16 after all. A constant scale needs no such optimizer: return
    `fddp.Weighted(loss, 2.0**15)`. Do so with `value_and_grad` too, which takes no optimizer.

    Args:
      optimizer: any optax transformation, with its clipping inside: clipping before it would hide infinite gradients.
        It sees gradients without the scale.
      initial: first scale. Powers of two change no digit of a float32.
      growth_interval: good steps after which the scale grows.
      factor: factor by which the scale grows and shrinks, more than 1.
      minimum: smallest scale. It may be below 1, as a `Weighted` loss is already multiplied by its weight.
      maximum: largest scale.

    Returns:
      The transformation; its state is a `DynamicScaleState`: look at `state.opt_state.scale`.

    Raises:
      ValueError: a number is out of its range.
      TypeError: the parameters are float16 themselves; raised where the state is made.

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
    for name, value in (("initial", initial), ("factor", factor), ("minimum", minimum), ("maximum", maximum)):
        check_number(f"dynamic_scale: {name}", value)
    if not 0 < minimum <= initial <= maximum < math.inf:
        raise ValueError(
            f"dynamic_scale needs 0 < minimum ≤ initial ≤ maximum, all finite, got {minimum=}, {initial=}, {maximum=}."
        )
    if not 1 < factor < math.inf:
        raise ValueError(f"factor must be a finite number above 1, got {factor!r}.")
    check_whole("growth_interval", growth_interval, 1)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> DynamicScaleState:
        _check_params(params)
        return DynamicScaleState(jnp.asarray(initial, jnp.float32), jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        finite = all_finite(updates)
        moved, moved_inner = inner.update(updates, state.inner, params, **extra)
        # Added to minus zero every number stays the same, plus zero and minus zero too.
        moved = jax.tree.map(lambda x: jnp.where(finite, x, -jnp.zeros_like(x)), moved)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved_inner, state.inner)
        good = jnp.where(finite, state.good_steps + 1, 0)
        due = good >= growth_interval
        grown = jnp.where(due, jnp.minimum(state.scale * factor, maximum), state.scale)
        scale = jnp.where(finite, grown, jnp.maximum(state.scale / factor, minimum))
        return moved, DynamicScaleState(scale, jnp.where(due, 0, good), kept)

    return optax.GradientTransformationExtraArgs(init, update)


def scaled(objective: Objective, opt_state: Any) -> Objective:
    """Multiplies the weight of an objective by the scales in an optimizer's state, if there are any.

    Args:
      objective: the loss, from `make_objective`.
      opt_state: an optimizer's state, with a `DynamicScaleState` anywhere in it, or none.

    Returns:
      The objective.
    """
    scale = scale_of(opt_state)

    def objective_times_scale(*args: Any) -> tuple[Array, Value]:
        weighted, value = objective(*args)
        return scale * weighted, value._replace(weight=scale * value.weight, divisor=scale * value.divisor)

    return objective_times_scale


def scale_of(opt_state: Any) -> Any:
    """The product of all scales in an optimizer's state; 1 if there are none."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, DynamicScaleState))
    return math.prod(x.scale for x in nodes if isinstance(x, DynamicScaleState))


def _check_params(params: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if getattr(x, "dtype", None) == jnp.float16:
            name = leaf_name(path)
            raise TypeError(
                f"dynamic_scale cannot take its scale out of a float16 gradient, and parameter {name!r} is float16; "
                "keep it in float32 and compute with fddp.mixed_precision(loss_fn, jnp.float16)."
            )


def all_finite(grads: Any) -> Bool[Array, ""]:
    """Whether all gradients of a tree are finite."""
    return reduce(jnp.logical_and, (jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)), jnp.bool_(True))
