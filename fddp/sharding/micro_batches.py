"""The rounds of a step in shards: what adds up from one micro-batch to the next is a part of the gradients."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array

from fddp.buckets import Messages, add_tail
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.losses import added, in_parts
from fddp.schedules import Round
from fddp.sharding.own_parts import Kept, Parts
from fddp.step import TrainState


class Before(NamedTuple):
    """A replica's values when a micro-batch begins."""

    params: Any
    """Whole parameters; None: those of the state are."""
    pending: Any
    """Everything that is pending, without the gradients that were sent."""
    broken: Any = None
    """Marks this replica's own gradients that were not all finite, where that is asked."""
    sums: tuple[tuple[Array, ...], ...] = ()
    """Its parts of the sums of gradients that came back, a bucket each: terms that are still to be added."""
    number: Any = np.zeros(1, np.int32)
    """The micro-batch's number."""


# (state, shards, what is there, rows of a micro-batch) → its gradients, all else that is pending, marks of those that
# are not finite, and the bytes that each bucket has sent to make them, () for none.
Gradients: TypeAlias = Callable[[TrainState, Any, Before, Any], tuple[Any, Any, Any, Any]]


def micro_batches(
    parts: Parts, begin: Callable[[TrainState, Any, Messages], Before], gradients: Gradients
) -> list[Round]:
    """Makes a round for each micro-batch.

    Args:
      parts: of one replica.
      begin: (state, pending, what came back before) → what is there at first.
      gradients: makes those of a micro-batch.

    Returns:
      The rounds; with the last one travel loss, metrics and buffers, and it keeps what those before it brought.
    """
    replica = parts.replica
    plan = parts.of_parts
    of = replica.options.accumulation_steps

    def one(number: int) -> Round:
        def backward(
            state: TrainState, shards: Any, pending: Any, rows: Any, came: Messages, kept: Any
        ) -> tuple[Messages, Any]:
            before = _following(kept, came) if number else begin(state, pending, came)
            # By a number that is given equal micro-batches are equal programs.
            part = jax.tree.map(lambda x: x[before.number[0]], in_parts(rows, of))
            grads, pending, broken, nbytes = gradients(state, shards, before, part)
            broken = add_replica_dim(broken)
            broken = broken if before.broken is None else before.broken | broken
            buckets = parts.packed(grads)
            if number == of - 1:
                tail, own = replica.tail(pending, rows)
                own, nbytes = add_replica_dim((own, nbytes))
                return add_tail(plan, buckets, tail), Kept(own, nbytes, broken, before.sums)
            sums = (reduce(added, before.sums),) if number else ()
            whole = add_replica_dim(before.params)  # as it crosses a program's border
            kept = Before(whole, add_replica_dim(pending), broken, sums, before.number + 1)
            return Messages(buckets, ((), None)), kept

        given = ("state", "shards", "pending", "rows")
        name = f"micro-batch {number}"
        if number == of - 1:
            return Round("backward", given, backward, parts.scatters, "compute")
        return Round(f"{name} backward", given, backward, parts.scatters_of(name), "compute")

    return [one(number) for number in range(of)]


def as_the_state_is(state: TrainState, pending: Any, messages: Messages) -> Before:
    """Begins with what is pending alone: nothing was gathered before."""
    del state, messages
    return Before(None, pending)


def _following(kept: Before, came: Messages) -> Before:
    """The values that are there when the next micro-batch begins."""
    return kept._replace(params=drop_replica_dim(kept.params), sums=(*kept.sums, came.arrays))


def by_whole_parameters(
    parts: Parts, state: TrainState, shards: Any, before: Before, part: Any
) -> tuple[Any, Any, Any, Any]:
    """Makes the gradients of a micro-batch by parameters that are whole.

    Args:
      parts: of one replica.
      state: what is equal on all replicas.
      shards: unused.
      before: what is there.
      part: rows of the micro-batch.

    Returns:
      As `Gradients`.
    """
    del shards
    state = state if before.params is None else state._replace(params=before.params)
    return *parts.replica.gradients(state, before.pending, part, 1), ()
