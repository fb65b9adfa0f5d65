"""Sharded steps: scatter the gradients, update each replica's parts, gather the parameters.

Together the messages have the bytes of an all-reduce. If only the optimizer's state is sharded, the
parameters are gathered at the end of the step. If the parameters are sharded too, they are gathered
at the start of the next step, in the order in which the forward pass uses them. The gradients of
each micro-batch are scattered during the next one's passes, and only parts are accumulated.

Source: ZeRO (Rajbhandari et al., SC 2020), stages 1 to 3 (stage 2 for micro-batches);
`ZeroRedundancyOptimizer` in `torch.distributed.optim`; PyTorch's FullyShardedDataParallel with
`SHARD_GRAD_OP`.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import Messages, insert_shards, split_shards
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.losses import Pending
from fddp.sharding.micro_batches import Before, as_the_state_is, micro_batches
from fddp.sharding.part_messages import gathers
from fddp.sharding.part_packing import ShardPlans, local_parts, pack_parameters, unpack_parameters
from fddp.sharding.sharded_update import AfterBackward, update_parts, with_bytes
from fddp.step import Agreed, Replica, TrainState
from fddp.step.schedules import Phase, Pieces


def gathered_last(replica: Replica, agreed: Agreed) -> Pieces:
    """Makes the pieces of a step that gathers the parameters as soon as they are updated."""
    plans = ShardPlans(replica, agreed)
    order = range(len(agreed.plan.buckets))

    def update(
        state: TrainState, shards: Sequence[Array], messages: Messages, saved: AfterBackward
    ) -> tuple[Messages, Any]:
        new_state, info = update_parts(plans, insert_shards(state, shards), messages, saved)
        replicated, new_shards = split_shards(new_state.opt_state)
        result = new_state._replace(params=None, opt_state=replicated), info
        buckets = pack_parameters(plans, new_state.params, order)
        return buckets, (add_replica_dim(result), new_shards)

    def unpack(
        state: TrainState,
        shards: Sequence[Array],
        messages: Messages,
        saved: tuple[Any, Any],
        message_bytes: Array,
    ) -> tuple[Any, Any]:
        new_state, info = drop_replica_dim(saved[0])
        new_shards = saved[1]
        params = unpack_parameters(plans, state.params, messages, order)
        new_state = new_state._replace(params=params)
        scatter_bytes, gather_bytes = jnp.split(message_bytes, [message_bytes.size - len(order)])
        info = with_bytes(plans, info, scatter_bytes, gather_bytes, order)
        return (new_state, info), new_shards

    phases = (
        *micro_batches(plans, as_the_state_is),
        Phase("update", ("state", "shards"), update, gathers(plans, order)),
    )
    return Pieces(phases, unpack)


def gathered_first(replica: Replica, agreed: Agreed) -> Pieces:
    """Makes the pieces of a step that gathers sharded parameters in order of first use."""
    plans = ShardPlans(replica, agreed)
    first_uses = [agreed.first_use(bucket) for bucket in agreed.plan.buckets]
    order = sorted(range(len(first_uses)), key=first_uses.__getitem__)

    def packed(state: TrainState, shards: Sequence[Array], *unused: Any) -> tuple[Messages, Any]:
        return pack_parameters(
            plans, local_parts(plans, insert_shards(state, shards).params), order
        ), ()

    def begin(state: TrainState, pending: Pending | None, messages: Messages) -> Before:
        return Before(unpack_parameters(plans, state.params, messages, order), pending)

    def update(
        state: TrainState,
        shards: Sequence[Array],
        messages: Messages,
        saved: AfterBackward,
        message_bytes: Array,
    ) -> tuple[Any, Any]:
        new_state, info = update_parts(plans, insert_shards(state, shards), messages, saved)
        replicated, new_shards = split_shards(new_state)
        gather_bytes, scatter_bytes = jnp.split(message_bytes, [len(order)])
        info = with_bytes(plans, info, scatter_bytes, gather_bytes, order)
        return (replicated, info), new_shards

    phases = (
        Phase("pack", ("state", "shards"), packed, gathers(plans, order)),
        *micro_batches(plans, begin),
    )
    return Pieces(phases, update)
