"""Updates parameters and optimizer state with mean gradients, on every replica."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fddp.comm import laid_out
from fddp.jaxpr import with_trained
from fddp.optim import DynamicScaleState, gradients_finite, recorded, skipped, update
from fddp.step import Mean, Replica, StepInfo, TrainState


def updated(
    optimizer: optax.GradientTransformation,
    replica: Replica,
    layout: TrainState,
    state: TrainState,
    mean: Mean,
) -> tuple[TrainState, StepInfo]:
    """Returns the next state and the step's report."""
    trained = replica.trained(state.params)
    new, opt_state = update(
        optimizer, mean.grads, state.opt_state, trained, mean.used, value=mean.loss
    )
    after = state._replace(
        params=with_trained(state.params, new), opt_state=opt_state, model_state=mean.model_state
    )
    after, is_skipped = _unless_skipped(mean, after, state)
    state = laid_out(replica.group.placement, after._replace(step=state.step + 1), layout)
    # `recorded` searches while the step is traced, and costs nothing at run time.
    return state, StepInfo(
        mean.loss,
        mean.aux,
        used=_counts(state.params, mean.used),
        learning_rate=recorded(opt_state, "learning_rate"),
        grad_norm=recorded(opt_state, "grad_norm"),
        sent=mean.sent,
        skipped=is_skipped,
        broken=mean.broken,
    )


def _unless_skipped(mean: Mean, new: TrainState, old: TrainState) -> tuple[TrainState, Any]:
    """Restores the old state in a skipped step; also returns a skip flag, None if never skipped."""
    by_optimizer = skipped(new.opt_state, mean.grads)
    if by_optimizer is not None:  # the optimizer skips only its own update
        buffers = jax.tree.map(partial(jnp.where, by_optimizer), old.model_state, new.model_state)
        new = new._replace(model_state=buffers)
    if mean.broken is None:
        return new, by_optimizer
    finite = gradients_finite(mean.grads)

    def chosen(new: Any, old: Any) -> Any:
        # `dynamic_scale` skips the step itself, and lowers its scale.
        return new if isinstance(new, DynamicScaleState) else jnp.where(finite, new, old)

    state = jax.tree.map(chosen, new, old, is_leaf=lambda x: isinstance(x, DynamicScaleState))
    if by_optimizer is None:
        return state, ~finite
    return state, ~finite | by_optimizer


def _counts(params: PyTree, used: Any) -> Any:
    """Arranges `used` like the parameters, with 0 for leaves that are not trained."""
    if used is None:
        return None
    return with_trained(jax.tree.map(lambda _: jnp.zeros((), jnp.int32), params), used)
