"""A sharded step that holds at most two whole buckets of parameters at a time.

Each bucket is gathered shortly before the forward pass reads it, dropped afterwards, and gathered
again for the backward pass. This sends half as many bytes again as an all-reduce, and saves the
memory of the whole parameters. The gathers are collectives inside the gradients' program; a layer
of a stack is gathered inside the loop that reads it.

Source: ZeRO (Rajbhandari et al., SC 2020), stage 3; `reshard_after_forward` of PyTorch's FSDP2.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fddp.buckets import BucketPlan, Messages, insert_shards, take_apart, whole_forms
from fddp.comm import MOST, drop_replica_dim
from fddp.hooks import plain_bytes
from fddp.jax_internals import Var
from fddp.jaxpr import LayerWeights, in_readings, run_in_readings
from fddp.losses import Pending
from fddp.schedules import Pieces, scope
from fddp.sharding.in_slices import Inputs, by_slices
from fddp.sharding.micro_batches import Before, as_the_state_is, micro_batches
from fddp.sharding.part_messages import gathers
from fddp.sharding.part_packing import gather, local_parts, pack_parameters, unpack_leaves
from fddp.sharding.shard_plans import ShardPlans
from fddp.sharding.sharded_update import AfterBackward, update_parts, with_bytes
from fddp.step import Facts, Replica, TrainState


def gathered_twice(replica: Replica, facts: Facts) -> Pieces:
    """Makes the pieces of a step that gathers its sharded parameters for each pass."""
    plans = ShardPlans(replica, facts, facts.read_in)
    order = range(len(facts.plan.buckets))

    def update(
        state: TrainState,
        shards: Sequence[Array],
        messages: Messages,
        saved: AfterBackward,
        message_bytes: Array,
    ) -> tuple[Any, Any]:
        new_state, info = update_parts(plans, insert_shards(state, shards), messages, saved)
        replicated, new_shards = take_apart(new_state)
        per_micro_batch = drop_replica_dim(saved.nbytes)
        count = replica.options.accumulation_steps
        gather_bytes = jnp.where(
            per_micro_batch > np.uint32(MOST // count),
            np.uint32(MOST),
            per_micro_batch * np.uint32(count),
        )
        info = with_bytes(plans, info, message_bytes, gather_bytes, order)
        return (replicated, info), new_shards

    return Pieces(tuple(micro_batches(plans, as_the_state_is, partial(_gradients, plans))), update)


def _gradients(
    plans: ShardPlans,
    state: TrainState,
    shards: Sequence[Array],
    before: Before,
    micro_batch: PyTree,
) -> tuple[Any, Any, Any, Any]:
    """Computes the gradients of a micro-batch, and gathers each bucket where they read it."""
    sharded_params = insert_shards(state, shards).params
    local_params = local_parts(plans, sharded_params)
    param_forms = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole_forms(sharded_params)
    )

    def whole(
        params: PyTree, state: TrainState, pending: Pending | None, micro_batch: PyTree
    ) -> Any:
        grads, pending, broken = plans.replica.gradients(
            state._replace(params=params), pending, micro_batch, 1
        )
        return pending, (grads, broken)

    with jax.sharding.use_abstract_mesh(plans.replica.group.placement.view):
        args = state._replace(params=None), before.pending, micro_batch
        closed, result_form = jax.make_jaxpr(whole, return_shape=True)(param_forms, *args)
    plan = plans.plan
    # The outputs before the gradients are those of the forward pass.
    forward_count = len(jax.tree.leaves(result_form[0]))
    grads = [
        i for i, x in enumerate(plan.treedef.flatten_up_to(result_form[1][0])) if x is not None
    ]
    sliced = by_slices(plan, closed, dict(enumerate(grads, forward_count)))
    bucket_of_input: dict[int, int] = {}
    for k, bucket in enumerate(plan.buckets):
        for i in bucket.leaves:
            bucket_of_input[sliced.inputs[i, bucket.slice]] = k
    rounds = {k: bucket.rounds for k, bucket in enumerate(plan.buckets) if bucket.rounds > 1}
    program = in_readings(sliced.closed, bucket_of_input, range(forward_count), rounds)
    leaves = plan.treedef.flatten_up_to(local_params)
    for i, form in enumerate(jax.tree.leaves(param_forms)):
        if not leaves[i].size:  # not gathered
            leaves[i] = jnp.zeros(form.shape, form.dtype)
    weights = [None if k in bucket_of_input else leaves[i] for (i, _), k in sliced.inputs.items()]
    rows = {k: _rows(plans, local_params, sliced.inputs, k) for k in rounds}
    bring = partial(_bring, plans, local_params, sliced.inputs)
    outputs = sliced.join(run_in_readings(program, [*weights, *jax.tree.leaves(args)], bring, rows))
    pending, (grads, broken) = jax.tree.unflatten(jax.tree.structure(result_form), outputs)
    gather_bytes = [min(program.times[k] * nbytes, MOST) for k, nbytes in enumerate(_bytes(plans))]
    return grads, pending, broken, jnp.asarray(gather_bytes, jnp.uint32)


def _bring(
    plans: ShardPlans,
    local_params: PyTree,
    inputs: Inputs,
    bucket: int,
    after: Mapping[Var, Array],
) -> tuple[Mapping[int, Any], Any]:
    """Gathers a bucket once the values of `after` exist; returns its leaves and these values."""
    (message,) = pack_parameters(plans, local_params, [bucket]).arrays
    # The barrier keeps XLA from gathering at once, and from gathering once for both passes.
    message, *values = jax.lax.optimization_barrier((message, *after.values()))
    return _gathered(plans, inputs, bucket, plans.only(bucket), message), dict(zip(after, values))


def _rows(plans: ShardPlans, local_params: PyTree, inputs: Inputs, bucket: int) -> LayerWeights:
    """Returns this replica's parts of a bucket, one row per round, and the gather of such a row."""
    (message,) = pack_parameters(plans, local_params, [bucket]).arrays
    rows = message.reshape(plans.plan.buckets[bucket].rounds, -1)
    return LayerWeights(rows, partial(_gathered, plans, inputs, bucket, plans.one_round(bucket)))


def _gathered(
    plans: ShardPlans,
    inputs: Inputs,
    bucket: int,
    pair: tuple[BucketPlan, BucketPlan],
    message: Array,
) -> Mapping[int, Any]:
    """Gathers the leaves of a bucket, or one layer of each; returns them by number of the input."""
    with jax.named_scope(scope(f"gather {bucket}")):
        rows = gather(plans, message)
    plan, part_plan = pair
    leaves = unpack_leaves(plans, plan, part_plan, (rows,))
    return {inputs[i, plan.buckets[0].slice]: leaves[i] for i in plan.buckets[0].leaves}


def _bytes(plans: ShardPlans) -> list[int]:
    """Counts the bytes that all devices of one replica send to gather each bucket."""
    reductions = gathers(plans, range(len(plans.plan.buckets)))
    group = plans.replica.group
    sizes = list[int]()
    for reduction, bucket in zip(reductions, plans.gather_plan.buckets):
        size = bucket.size * group.placement.devices_of_replica
        sizes.append(plain_bytes(group.communicator, reduction, size, bucket.dtype))
    return sizes
