"""A step of a replica that trains alone: it counts what it has trained on, and sends nothing."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fddp.buckets import Messages
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.local_training.inside import Trains
from fddp.local_training.several import NOTHING
from fddp.optim import scale_of
from fddp.schedules import Pieces, Round
from fddp.step import Facts, Mean, Replica, StepInfo, TrainState


def counted(facts: Facts, joined: bool) -> Facts:
    """Makes an update count how much it has trained on.

    Args:
      facts: of a step.
      joined: whether data may end, so that there may be nothing to train on.

    Returns:
      The facts; a state's optimizer is `Trains`.
    """

    def use(view: TrainState, mean: Mean) -> tuple[TrainState, StepInfo]:
        opt_state, weight = view.opt_state
        own = view._replace(opt_state=opt_state)
        new, info = facts.use(own, mean)
        if joined:
            chosen = partial(jnp.where, mean.weight > 0)
            new = new._replace(
                params=jax.tree.map(chosen, new.params, own.params),
                opt_state=jax.tree.map(chosen, new.opt_state, own.opt_state),
                model_state=jax.tree.map(chosen, new.model_state, own.model_state),
            )
        trained_on = mean.weight / scale_of(opt_state)
        if info.skipped is not None:
            trained_on = jnp.where(info.skipped, 0, trained_on)
        return new._replace(opt_state=Trains(new.opt_state, weight + trained_on.astype(weight.dtype))), info

    return facts._replace(use=use)


def by_itself(replica: Replica, facts: Facts) -> Pieces:
    """The pieces of a step of one replica, which sends nothing; its buffers are its own."""
    plan = facts.plan
    solo = replace(replica, options=replace(replica.options, broadcast_buffers=False))

    def backward(state: TrainState, pending: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
        sums, kept = solo.local(lambda grads, tail: (grads, tail), state, pending, rows)  # type: ignore
        return NOTHING, (add_replica_dim(sums), kept)

    def unpacked(sums: Any) -> tuple[list[Any], Any]:
        grads, tail = sums
        return plan.treedef.flatten_up_to(grads), tail

    def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        sums, kept = kept
        nothing = jnp.zeros(len(plan.messages), jnp.uint32)
        return facts.use(state, solo.mean(plan, unpacked, state, drop_replica_dim(sums), kept, nothing)), shards  # type: ignore

    return Pieces((Round("backward", ("state", "pending", "rows"), backward, (), "compute"),), finish)
