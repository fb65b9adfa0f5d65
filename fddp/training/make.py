"""Makes a training step from a loss, an optimizer and options."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from fddp.comm import Group
from fddp.losses import check_callable, make_objective
from fddp.runtime import group_of
from fddp.sharding import sharded
from fddp.step import (
    WHOLE_STATE,
    Optimizer,
    OptionArguments,
    Options,
    Replica,
    Strategy,
    explained,
    name_of,
    read_optimizer,
    read_options,
)
from fddp.training.train_step import TrainStep
from fddp.training.update import updated
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
        return sharded(options.shard)
    return WHOLE_STATE
