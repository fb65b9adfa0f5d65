"""Converts the user's loss to one form, the objective."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from fddp.losses.batches import Joined, Undivided
from fddp.losses.results import (
    Weighted,
    check_buffers,
    check_takes,
    float_metrics,
    pair_of,
    scalar_loss,
    scalar_weight,
)
from fddp.wording import check_switch


class Evaluated(NamedTuple):
    """A loss with its weight, buffers and metrics."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """w in Σ w·g."""
    divisor: Float[Array, ""]
    """w in Σ w: equal to `weight`, except under `fddp.join`. There a rank without data has the
    weight 0, and the divisor that its rows would have, so that its gradients count as zeros."""
    unit: Int[Array, ""]
    """Rows per unit of weight; 1 if the loss returns its weight."""
    model_state: Any
    aux: Any


# (params, model_state, rng, batch, unit=None) → (w·loss, `Evaluated`); `unit`: rows per unit of
# weight, None: all of the batch
Objective = Callable[..., tuple[Array, Evaluated]]


def make_objective(loss_fn: Callable[..., Any], *, has_aux: bool) -> Objective:
    """Converts a loss to the form (params, model_state, rng, batch, unit=None) → (w·loss, values).

    `loss_fn(params, batch)` gets `model_state=` and `rng=` if the state has them. It returns a
    loss, `(loss, aux)` with `has_aux`, or `(loss, (model_state, aux))` with a model state. When it
    is traced, the objective raises ValueError or TypeError for other results.

    A loss may be `Weighted`. The weight of a plain loss is the number of its rows, since it is
    their mean, and ranks may have different numbers of rows. Rows are counted in units, such as the
    rows of the first batch: so most weights are 1, which rounds nothing. An undivided batch has the
    weight 1.
    """
    check_switch("has_aux", has_aux)

    def objective(
        params: PyTree, model_state: PyTree, rng: PyTree, batch: PyTree, unit: int | None = None
    ) -> tuple[Array, Evaluated]:
        if not isinstance(batch, Joined):
            batch = Joined(batch, 1, 1)
        batch, share, divisor, _ = batch
        rows = jnp.shape(jax.tree.leaves(batch)[0])[0]  # 1 for an undivided batch
        if isinstance(batch, Undivided):
            batch = jax.tree.map(lambda x: x[0], batch.rows)
        extra = {"model_state": model_state, "rng": rng}
        extra = {name: x for name, x in extra.items() if x is not None}
        check_takes(loss_fn, params, batch, extra)
        value = loss_fn(params, batch, **extra)
        aux = None
        if model_state is not None:
            before = model_state
            value, buffers_and_aux = pair_of(value, "(loss, (model_state, aux))")
            model_state, aux = pair_of(buffers_and_aux, "(loss, (model_state, aux))")
            check_buffers(before, model_state)
        elif has_aux:
            value, aux = pair_of(value, "(loss, aux)")
        if isinstance(value, Weighted):
            unit = 1
            value, weight = value
        else:
            unit = unit or rows
            weight = rows / unit
        loss = scalar_loss(value)
        weight = jax.lax.stop_gradient(scalar_weight(weight, loss.dtype))
        # The fractions of the rows that count in gradients, and in the divisor.
        counted = weight * jnp.mean(jnp.asarray(share, loss.dtype))
        divisor = weight * jnp.mean(jnp.asarray(divisor, loss.dtype))
        return counted * loss, Evaluated(
            loss, counted, divisor, jnp.int32(unit), model_state, float_metrics(aux)
        )

    return objective
