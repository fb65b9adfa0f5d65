"""One update of the optimizer by averaged gradients, on every replica."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fddp.comm import laid_out
from fddp.optim import DynamicScaleState, all_finite, recorded, skipped, update
from fddp.step import Mean, Replica, StepInfo, TrainState, with_trained


def updated(
    optimizer: optax.GradientTransformation, replica: Replica, where: TrainState, state: TrainState, mean: Mean
) -> tuple[TrainState, StepInfo]:
    """Updates parameters and optimizer.

    Args:
      optimizer: of the step.
      replica: what one replica does.
      where: a tree like the state: where the parts of each array lie.
      state: the state that the gradients are of.
      mean: gradients, loss and buffers, equal on all replicas.

    Returns:
      The next state, and what a step tells.
    """
    trained = replica.trained(state.params)
    new, opt_state = update(optimizer, mean.grads, state.opt_state, trained, mean.used, value=mean.loss)
    after = state._replace(params=with_trained(state.params, new), opt_state=opt_state, model_state=mean.model_state)
    after, is_skipped = _unless_skipped(mean, after, state)
    state = laid_out(replica.group.placement, after._replace(step=state.step + 1), where)
    # What is recorded is looked for while the program is made, and costs a step nothing.
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
    """Keeps the old state in a skipped step; also returns whether it is skipped, None without skips."""
    by_optimizer = skipped(new.opt_state, mean.grads)
    if by_optimizer is not None:  # the optimizer skips its own update; buffers are not in its hands
        buffers = jax.tree.map(partial(jnp.where, by_optimizer), old.model_state, new.model_state)
        new = new._replace(model_state=buffers)
    if mean.broken is None:
        return new, by_optimizer
    finite = all_finite(mean.grads)

    def chosen(new: Any, old: Any) -> Any:
        # It skips such steps by itself, and has a scale to lower.
        return new if isinstance(new, DynamicScaleState) else jnp.where(finite, new, old)

    state = jax.tree.map(chosen, new, old, is_leaf=lambda x: isinstance(x, DynamicScaleState))
    return state, ~finite if by_optimizer is None else ~finite | by_optimizer


def _counts(params: Any, used: Any) -> Any:
    """A count for every leaf of the parameters."""
    return None if used is None else with_trained(jax.tree.map(lambda _: jnp.zeros((), jnp.int32), params), used)
