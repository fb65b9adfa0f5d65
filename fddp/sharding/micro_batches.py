"""The phases of a sharded step, one per micro-batch: a replica adds up its parts of the sums."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from fddp.buckets import Messages, add_tail
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.losses import Pending, add_trees, split_rows
from fddp.sharding.part_messages import scatters, scatters_of
from fddp.sharding.part_packing import ShardPlans, pack_gradients
from fddp.sharding.sharded_update import AfterBackward
from fddp.step import TrainState
from fddp.step.schedules import Phase


class Before(NamedTuple):
    """A replica's values at the start of a micro-batch."""

    params: Any
    """Whole parameters; None: those of the state."""
    pending: Any
    """Pending sums and buffers, without gradients that were already sent."""
    broken: Any = None
    """Marks this replica's non-finite gradients so far; None if not checked."""
    sums: tuple[tuple[Array, ...], ...] = ()
    """Terms of this replica's parts of the summed gradients, each with one array per bucket."""
    number: Any = np.zeros(1, np.int32)
    """Number of the micro-batch."""


def micro_batches(
    plans: ShardPlans, begin: Callable[[TrainState, Pending | None, Messages], Before]
) -> list[Phase]:
    """Makes one phase per micro-batch; the last phase also sends loss, metrics and buffers.

    `begin` maps (state, pending, received messages) to the values at the start of the first phase.
    """
    replica = plans.replica
    plan = plans.part_plan
    count = replica.options.accumulation_steps

    def micro_batch_phase(number: int) -> Phase:
        def backward(
            state: TrainState,
            shards: Sequence[Array],
            pending: PyTree,
            rows: PyTree,
            received: Messages,
            saved: PyTree,
        ) -> tuple[Messages, Any]:
            del shards
            before = _following(saved, received) if number else begin(state, pending, received)
            # The number is an input, so that equal micro-batches are equal programs.
            micro_batch = jax.tree.map(lambda x: x[before.number[0]], split_rows(rows, count))
            if before.params is not None:
                state = state._replace(params=before.params)
            grads, pending, broken = replica.gradients(state, before.pending, micro_batch, 1)
            broken = add_replica_dim(broken)
            if before.broken is not None:
                broken = before.broken | broken
            buckets = pack_gradients(plans, grads)
            if number == count - 1:
                tail, local_buffers = replica.tail(pending, rows)
                return add_tail(plan, buckets, tail), AfterBackward(
                    add_replica_dim(local_buffers), broken, before.sums
                )
            sums = (reduce(add_trees, before.sums),) if number else ()
            params = add_replica_dim(before.params)  # as for every output of a program
            saved = Before(params, add_replica_dim(pending), broken, sums, before.number + 1)
            return Messages(buckets, ((), None)), saved

        reads = ("state", "shards", "pending", "rows")
        name = f"micro-batch {number}"
        if number == count - 1:
            return Phase("backward", reads, backward, scatters(plans))
        return Phase(f"{name} backward", reads, backward, scatters_of(plans, name))

    return [micro_batch_phase(number) for number in range(count)]


def as_the_state_is(state: TrainState, pending: Pending | None, messages: Messages) -> Before:
    """Returns the values at the start of a step without gathered parameters."""
    del state, messages
    return Before(None, pending)


def _following(saved: Before, received: Messages) -> Before:
    """Returns the values at the start of the next micro-batch."""
    return saved._replace(
        params=drop_replica_dim(saved.params), sums=(*saved.sums, received.arrays)
    )
