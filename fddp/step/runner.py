"""The pieces that a schedule makes a step of: of replicas that are whole, in shards, alone, or virtual."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fddp.buckets import BucketPlan, Messages, pack_device_parts, scalar_dtype, unpack_device_parts
from fddp.comm import specs
from fddp.schedules import Pieces, Round, Runner, Schedule
from fddp.step.local import Local
from fddp.step.local_runner import local_runner
from fddp.step.replica import Replica
from fddp.step.sharded import sharded_pieces
from fddp.step.state import Mean, TrainState
from fddp.step.virtual import virtual_runner, virtual_step


def runner_of(
    schedule: Schedule,
    replica: Replica,
    plan: BucketPlan,
    state: TrainState,
    batch: Any,
    told: Any,
    uses: Sequence[int],
    use: Callable[[TrainState, Mean], Any],
) -> Runner:
    """Makes what runs a step.

    Args:
      schedule: launches it.
      replica: what one replica does.
      plan: the buckets.
      state: the forms of the state.
      batch: this process's rows, or their forms.
      told: the forms of loss and aux.
      uses: when the forward pass first uses each leaf.
      use: what is done with averaged gradients.

    Returns:
      The runner.
    """
    options = replica.options
    group = replica.group
    if options.virtual_replicas:
        return virtual_runner(schedule, virtual_step(replica, plan, state, batch, use), group, options.donate)
    if options.shard:
        first = [min(uses[i] for i in bucket.leaves) for bucket in plan.buckets]
        pieces = sharded_pieces(replica, plan, sorted(range(len(first)), key=first.__getitem__), use)
    else:
        pieces = _whole_pieces(replica, plan, state, uses, use)
    if replica.local_steps:
        weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
        scalars = scalar_dtype(jax.tree.leaves((told, state.model_state, weight)))
        local = Local(replica.local_steps, replica, plan, use, scalars)
        schedule = partial(local_runner, schedule, local)
    return schedule(group, pieces, options.donate)


def _whole_pieces(
    replica: Replica,
    plan: BucketPlan,
    state: TrainState,
    uses: Sequence[int],
    use: Callable[[TrainState, Mean], Any],
) -> Pieces:
    """The pieces of a step that every replica does as a whole."""
    axes = replica.group.placement.other_axes
    where = specs(replica.group.placement, state.params)

    def unpack(messages: Messages) -> tuple[list[Any], Any]:
        return unpack_device_parts(axes, plan, messages, where)

    def backward(state: TrainState, pending: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
        return replica.local(partial(pack_device_parts, axes, plan, where=where), state, pending, rows)

    def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        return use(state, replica.mean(plan, unpack, state, messages, kept, sent)), shards

    given = ("state", "pending", "rows")
    sums = replica.reductions(plan, state.params)
    buckets = {one.name: plan.buckets[one.bucket] for one in plan.messages if one.bucket is not None}
    first = {name: min(uses[i] for i in bucket.leaves) for name, bucket in buckets.items() if name != plan.carrier.name}
    return Pieces((Round("backward", given, backward, sums, "compute"),), finish, uses=first)
