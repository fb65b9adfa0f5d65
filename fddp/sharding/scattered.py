"""Sharded steps: scatter the gradients, update each replica's parts, gather the parameters.

Together the messages have the bytes of an all-reduce. If only the optimizer's state is sharded, the
parameters are gathered at the end of the step. If the parameters are sharded too, they are gathered
at the start of the next step, in the order in which the forward pass uses them. The gradients of
each micro-batch are scattered during the next one's passes, and only parts are accumulated.

Source: ZeRO (Rajbhandari et al., SC 2020), stages 1 to 3 (stage 2 for micro-batches);
`ZeroRedundancyOptimizer` in `torch.distributed.optim`; PyTorch's FullyShardedDataParallel with
`SHARD_GRAD_OP`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from fddp.buckets import Message, Messages, add_tail, insert_shards, pack_parts, split_shards
from fddp.comm import Communicator, count_bytes, forms_of, more_sent
from fddp.hooks import Reduction, gathered, plain, reductions, scattered
from fddp.losses import Pending, add_trees, split_rows
from fddp.sharding.part_packing import (
    ShardPlans,
    local_parts,
    pack_parameters,
    unpack_parameters,
    unpack_sums,
)
from fddp.sharding.parts_update import run_on_parts
from fddp.step import Agreed, Mean, Replica, StepInfo, TrainState, params_checked
from fddp.step.schedules import Pieces, Send

Bytes = UInt32[Array, " messages"]


def gathered_last(replica: Replica, agreed: Agreed) -> Pieces:
    """Makes the pieces of a step that gathers the parameters as soon as they are updated."""
    plans = ShardPlans(replica, agreed)
    order = range(len(agreed.plan.buckets))

    def run(
        state: TrainState, pending: Pending | None, shards: Any, rows: PyTree, send: Send
    ) -> tuple[Any, Any]:
        old_state = insert_shards(state, shards)
        local_state = old_state._replace(params=local_parts(plans, state.params))
        mean = _mean(plans, state, local_state, pending, rows, send)
        new_state, info = _updated(plans, old_state, local_state, mean)
        received, nbytes = send(pack_parameters(plans, new_state.params, order))
        params = unpack_parameters(plans, state.params, received, order)
        new_state, shards = split_shards(new_state._replace(params=params))
        return (new_state, _with_gathers(info, nbytes, order)), shards

    run = params_checked(replica, forms_of(agreed.common.state.params), run)
    return Pieces(run, (*_scatters(plans), *_gathers(plans, order)))


def gathered_first(replica: Replica, agreed: Agreed) -> Pieces:
    """Makes the pieces of a step that gathers sharded parameters in order of first use."""
    plans = ShardPlans(replica, agreed)
    first_uses = [agreed.first_use(bucket) for bucket in agreed.plan.buckets]
    order = sorted(range(len(first_uses)), key=first_uses.__getitem__)

    def run(
        state: TrainState, pending: Pending | None, shards: Any, rows: PyTree, send: Send
    ) -> tuple[Any, Any]:
        old_state = insert_shards(state, shards)
        local_state = old_state._replace(params=local_parts(plans, old_state.params))
        received, nbytes = send(pack_parameters(plans, local_state.params, order))
        whole = state._replace(params=unpack_parameters(plans, state.params, received, order))
        mean = _mean(plans, whole, local_state, pending, rows, send)
        new_state, info = _updated(plans, old_state, local_state, mean)
        new_state, shards = split_shards(new_state)
        return (new_state, _with_gathers(info, nbytes, order)), shards

    return Pieces(run, (*_gathers(plans, order), *_scatters(plans)))


def _mean(
    plans: ShardPlans,
    state: TrainState,
    local_state: TrainState,
    pending: Pending | None,
    rows: PyTree,
    send: Send,
) -> Mean:
    """Returns the mean over replicas, with this replica's parts of the gradients.

    The gradients of each micro-batch leave alone; the last also send loss, metrics and buffers.
    `state` has whole parameters, `local_state` this replica's parts of them.
    """
    replica = plans.replica
    plan = plans.part_plan
    micro_batches = split_rows(rows, replica.options.accumulation_steps)
    *others, last = range(replica.options.accumulation_steps)
    sums = list[tuple[Array, ...]]()  # terms of the sum
    marks = list[Any]()
    earlier_bytes = list[Bytes]()

    def packed(number: int) -> tuple[Array, ...]:
        nonlocal pending
        micro_batch = jax.tree.map(lambda x: x[number], micro_batches)
        grads, pending, broken = replica.gradients(state, pending, micro_batch, 1)
        marks.append(broken)
        return pack_parts(plans.plan, plan, grads)

    for number in others:
        messages = Messages(packed(number), ((), None))
        if sums:
            sums = [reduce(add_trees, sums)]
        received, nbytes = send(messages)
        sums.append(received.arrays)
        earlier_bytes.append(nbytes)
    buckets = packed(last)
    tail, buffers = replica.tail(pending, rows)  # type: ignore
    received, nbytes = send(add_tail(plan, buckets, tail))
    carrying = np.array([k for k, x in enumerate(plan.messages) if x.bucket is not None], int)
    for earlier in earlier_bytes:
        nbytes = nbytes.at[carrying].set(more_sent(nbytes[carrying], earlier))
    broken = None if None in marks else reduce(jnp.logical_or, marks)
    unpack = partial(unpack_sums, plans, sums)
    return replica.mean(plan, unpack, local_state, received, (buffers, broken), nbytes)


def _updated(
    plans: ShardPlans, state: TrainState, local_state: TrainState, mean: Mean
) -> tuple[TrainState, StepInfo]:
    """Updates this replica's parts; the new parameters are sharded if those of `state` are."""
    comm = plans.replica.group.communicator
    args = plans.replica, plans.agreed.use, plans.leaf_layouts, state, local_state, mean
    (new_state, info), nbytes = count_bytes(comm, partial(run_on_parts, *args))
    last = info.sent[-1:]
    return new_state, info._replace(sent=info.sent.at[-1:].set(more_sent(last, nbytes)))


def _with_gathers(info: StepInfo, nbytes: Bytes, order: Sequence[int]) -> StepInfo:
    """Adds the bytes of gathers, which carry the buckets in this order."""
    buckets = np.array(order, int)
    sent = jnp.asarray(info.sent)
    return info._replace(sent=sent.at[buckets].set(more_sent(sent[buckets], nbytes)))


### Reductions


def _scatters(plans: ShardPlans) -> list[Reduction]:
    """The reductions of gradients: each replica receives its parts, and all of the tail."""
    hook = plans.replica.options.hook

    def scatter(message: Message, reduction: Reduction) -> Reduction:
        if message.bucket is None:
            return reduction
        if hook is not None:
            return reduction._replace(apply=partial(_part_of_sum, reduction.apply))
        return reduction._replace(apply=plain(scattered, reduction.rounds))

    last = list(map(scatter, plans.plan.messages, reductions(plans.plan, hook)))
    others = [
        reduction._replace(name=f"micro-batch {number} {reduction.name}")
        for number in range(plans.replica.options.accumulation_steps - 1)
        for message, reduction in zip(plans.plan.messages, last)
        if message.bucket is not None
    ]
    return [*others, *last]


def _gathers(plans: ShardPlans, order: Sequence[int]) -> list[Reduction]:
    """The gathers of these buckets of parameters, in this order."""
    contents = {
        x.bucket: reduction.contents
        for x, reduction in zip(plans.plan.messages, reductions(plans.plan, None))
    }
    return [Reduction(f"gather {k}", contents[k], plain(gathered)) for k in order]


def _part_of_sum(
    apply: Callable[..., tuple[Array, PyTree]], comm: Communicator, message: Array, memory: PyTree
) -> tuple[Array, Any]:
    """Sums the shards of all replicas by a hook; returns this replica's part."""
    total, memory = apply(comm, message.reshape(comm.size, -1), memory)
    if total.ndim == 2:
        total = total[comm.replica_index()]
    return total, memory
