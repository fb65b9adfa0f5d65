"""A local step of one replica: it sends nothing, and counts the data that it trains on."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.buckets import Messages
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.local_training.due_exchanges import NOTHING
from fddp.local_training.inside import Trains
from fddp.losses import Pending
from fddp.optim import scale_of
from fddp.schedules import Pieces, Round
from fddp.step import Agreed, Mean, Replica, StepInfo, TrainState


def counted(agreed: Agreed, joined: bool) -> Agreed:
    """Makes an update add Σ w to the state's weight; the optimizer state is then a `Trains`.

    With `joined`, where data may end, an update without data leaves the state unchanged.
    """

    def use(view: TrainState, mean: Mean) -> tuple[TrainState, StepInfo]:
        opt_state, weight = view.opt_state
        old = view._replace(opt_state=opt_state)
        new, info = agreed.use(old, mean)
        if joined:
            chosen = partial(jnp.where, mean.weight > 0)
            new = new._replace(
                params=jax.tree.map(chosen, new.params, old.params),
                opt_state=jax.tree.map(chosen, new.opt_state, old.opt_state),
                model_state=jax.tree.map(chosen, new.model_state, old.model_state),
            )
        trained_on = mean.weight / scale_of(opt_state)
        if info.skipped is not None:
            trained_on = jnp.where(info.skipped, 0, trained_on)
        return new._replace(
            opt_state=Trains(new.opt_state, weight + trained_on.astype(weight.dtype))
        ), info

    return agreed._replace(use=use)


def by_itself(replica: Replica, agreed: Agreed) -> Pieces:
    """Makes the pieces of a step of one replica, with local buffers and no messages."""
    plan = agreed.plan
    solo = replace(replica, options=replace(replica.options, broadcast_buffers=False))

    def backward(
        state: TrainState, pending: Pending | None, rows: PyTree, *nothing: Any
    ) -> tuple[Messages, Any]:
        sums, saved = solo.local(lambda a, b: (a, b), state, pending, rows)  # type: ignore
        return NOTHING, (add_replica_dim(sums), saved)

    def unpacked(sums: PyTree) -> tuple[list[Any], Any]:
        grads, tail = sums
        return plan.treedef.flatten_up_to(grads), tail

    def finish(
        state: TrainState, shards: PyTree, messages: Messages, saved: PyTree, nbytes: jax.Array
    ) -> tuple[Any, Any]:
        sums, saved = saved
        no_bytes = jnp.zeros(len(plan.messages), jnp.uint32)
        return agreed.use(
            state, solo.mean(plan, unpacked, state, drop_replica_dim(sums), saved, no_bytes)
        ), shards  # type: ignore

    return Pieces(
        (Round("backward", ("state", "pending", "rows"), backward, (), "compute"),), finish
    )
