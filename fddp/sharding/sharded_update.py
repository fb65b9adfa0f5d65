"""The end of a sharded step: the update of a replica's parts, and the bytes of all messages."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import Messages
from fddp.comm import as_uint32, count_bytes
from fddp.sharding.part_packing import ShardPlans, local_parts, unpack_sums
from fddp.sharding.parts_update import run_on_parts
from fddp.step import StepInfo, TrainState
from fddp.step.schedules import by_bucket, more_sent


class AfterBackward(NamedTuple):
    """A replica's values once its last gradients are sent."""

    buffers: Any
    """The buffers that stay on this replica."""
    broken: Any
    """Marks this replica's non-finite gradients; None if not checked."""
    sums: tuple[tuple[Array, ...], ...]
    """Terms of this replica's parts of the summed gradients, as in `Before`."""


def update_parts(
    plans: ShardPlans, state: TrainState, messages: Messages, saved: AfterBackward
) -> tuple[TrainState, StepInfo]:
    """Updates this replica's parts; the new parameters are sharded if those of `state` are."""
    replica = plans.replica
    local_state = state._replace(params=local_parts(plans, state.params))
    no_bytes = jnp.zeros(len(plans.plan.messages), jnp.uint32)
    unpack = partial(unpack_sums, plans, saved.sums)
    flags = saved.buffers, saved.broken
    mean = replica.mean(plans.part_plan, unpack, local_state, messages, flags, no_bytes)
    comm = replica.group.communicator
    use = plans.agreed.use
    leaf_layouts = plans.leaf_layouts
    update = partial(run_on_parts, replica, use, leaf_layouts, state, local_state, mean)
    (new_state, info), nbytes = count_bytes(comm, update)
    return new_state, info._replace(sent=no_bytes.at[-1].add(as_uint32(nbytes)))


def with_bytes(
    plans: ShardPlans,
    info: StepInfo,
    scatter_bytes: Array,
    gather_bytes: Array,
    order: Sequence[int],
) -> StepInfo:
    """Adds the bytes of scatters and gathers by bucket; scalars and the update come last."""
    plan = plans.plan
    earlier, last = jnp.split(scatter_bytes, [scatter_bytes.size - len(plan.messages)])
    totals = by_bucket(plan, last)
    buckets = np.array(order, int)
    totals = totals.at[buckets].set(more_sent(totals[buckets], gather_bytes))
    for nbytes in earlier.reshape(-1, len(plan.buckets)):
        totals = totals.at[: nbytes.size].set(more_sent(totals[: nbytes.size], nbytes))
    return info._replace(sent=more_sent(totals, info.sent))
