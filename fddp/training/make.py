"""Makes a training step from a loss, an optimizer and options."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fddp.comm import Group, laid_out
from fddp.jaxpr import with_trained
from fddp.losses import check_callable, make_objective
from fddp.optim import DynamicScaleState, gradients_finite, recorded, skipped, update
from fddp.runtime import group_of
from fddp.sharding import Sharded
from fddp.step import (
    WHOLE_STATE,
    Mean,
    Optimizer,
    OptionArguments,
    Options,
    Replica,
    StepInfo,
    Strategy,
    TrainState,
    explained,
    name_of,
    read_optimizer,
    read_options,
)
from fddp.training.train_step import TrainStep
from fddp.training.virtual_strategy import VirtualStrategy


@explained
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    group: Group | None = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> TrainStep:
    """Makes a training step over many replicas, equivalent to one replica with the joined batch.

    Args:
      loss_fn: `loss_fn(params, batch)` → loss, or (loss, aux) with `has_aux`. With a model state it
        also takes `model_state=` and returns (loss, (model_state, aux)). With a random key it also
        takes `rng=`, a separate key for each step, micro-batch and replica.
      optimizer: any optax transformation, or `fddp.local_steps` of one. Transformations with extra
        arguments receive `value`, the mean loss, and `grad`.
      group: the replicas; None: the group of `fddp.init()`.
      has_aux: whether the loss returns metrics, a tree of floats. They are averaged over replicas,
        element by element.
      **options: fields of `fddp.Options`, named as DDP names them.

    Returns:
      A `TrainStep`: `step.init(params)` → state, `step(state, batch)` → (state, info).

    Raises:
      TypeError: an unknown option, a loss that is not a function, or an optimizer that needs more
        than loss and gradients.
      ValueError: an option out of its range.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.25))
      >>> state, info = step(step.init(jnp.zeros(())), jnp.full(8, 2.0))
      >>> float(info.loss), float(state.params)
      (4.0, 1.0)
    """
    check_callable("train_step", "loss_fn", loss_fn)
    chosen = read_optimizer("train_step", optimizer)
    settings = read_options("train_step", options)
    group = group_of("train_step", group)
    chosen = chosen.on(group)
    objective = make_objective(loss_fn, has_aux=has_aux)
    strategy = chosen.strategy(strategy_of(settings))
    replica = Replica(objective, group, settings, strategy, init=chosen.init, loss=name_of(loss_fn))
    return TrainStep(replica, chosen, partial(updated, chosen.inner))


def strategy_of(options: Options) -> Strategy:
    """Chooses the strategy of a step; `Replica` checks whether its options are compatible."""
    if options.virtual_replicas:
        count = options.virtual_replicas
        return VirtualStrategy(name=f"virtual_replicas={count}", replicas=count)
    if options.shard:
        return Sharded(shared=options.shard, name=f"shard={options.shard!r}")
    return WHOLE_STATE


### The update


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
    used = None
    if mean.used is not None:  # 0 for leaves that are not trained
        zeros = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), state.params)
        used = with_trained(zeros, mean.used)
    # `recorded` searches while the step is traced, and costs nothing at run time.
    return state, StepInfo(
        mean.loss,
        mean.aux,
        used=used,
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
