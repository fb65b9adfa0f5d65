"""Sums one message over the replicas between programs, for the schedules that run several programs."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jaxtyping import Array, UInt32

from fddp.buckets import BucketPlan
from fddp.comm import MOST, REPLICATED, Group, Transport, add_replica_dim, as_uint32, drop_replica_dim
from fddp.hooks import Reduction, all_finite, plain_bytes, summed
from fddp.jax_internals import asked_for
from fddp.schedules.timeline import Span


class Sent(NamedTuple):
    """A message that has come back."""

    total: Any
    memory: Any
    """The memory of its reduction."""
    nbytes: Any
    """Bytes that each replica sent."""
    span: Span
    finite: bool = True
    """Whether a hook's sum is finite; the same on all ranks."""


def sending(group: Group, reductions: Sequence[Reduction]) -> Callable[..., Sent]:
    """Makes a function that sends a message and blocks the calling thread until its sum is there.

    Args:
      group: the replicas.
      reductions: how the messages are summed.

    Returns:
      `send(k, mine, said, message)`, which returns the sum of message k; `mine` is its hook's memory, and `said()`
      returns the sum that decides whether this message is needed.
    """
    own = group.placement.per_replica
    transports = side_by_side(group, reductions)

    def program(reduction: Reduction) -> Callable[..., Any]:
        def run(message: jax.Array, mine: Any) -> tuple[Any, Any, Any, Any]:
            total, mine, sent = summed(group.transport.inside, reduction, None, message, drop_replica_dim(mine))
            return total, add_replica_dim(mine), sent, all_finite(total)

        back = own if reduction.among_some or reduction.collective == "reduce_scatter" else REPLICATED
        # The memory is not donated: `remembered` may still want it.
        return group.placement.program(run, (own, own), (back, own, REPLICATED, REPLICATED))

    programs = [program(reduction) for reduction in reductions]

    def send(k: int, mine: Any, said: Callable[[], jax.Array], message: jax.Array) -> Sent:
        reduction = reductions[k]
        transport = transports[k % len(transports)]
        size = message.size // group.placement.replicas_in_array
        finite = True
        needed = reduction.asks is None or jax.device_get(said())[list(reduction.asks.places)].any()
        start = perf_counter()
        if not needed:
            total = group.placement.place(np.zeros(size, message.dtype), REPLICATED)
            sent = size = 0
        else:
            group.recovery.sends()
            with TraceAnnotation(reduction.name), group.journal.message(reduction.title, size * message.dtype.itemsize):
                if reduction.apply is None:
                    blocks = (reduction.blocks,) if reduction.collective == "tree_reduce" else ()
                    total = getattr(transport.at(reduction.level), reduction.collective)(message, *blocks)
                    sent = plain_bytes(group.communicator, reduction, size, message.dtype)
                else:
                    with asked_for():  # a collective of MPI takes a token along, which is new in each thread
                        total, mine, sent, finite = jax.block_until_ready(programs[k](message, mine))
        nbytes = size * message.dtype.itemsize
        span = Span("communication", reduction.name, start, perf_counter(), nbytes)
        return Sent(total, mine, sent, span, bool(jax.device_get(finite)))

    return send


def side_by_side(group: Group, reductions: Sequence[Reduction]) -> tuple[Transport, ...]:
    """The transports that take turns with the messages between programs.

    Hooks share one communicator, where two would mix. So do reduce-scatters and all-gathers, whose parts have owners in
    one order of the replicas, and tree-reduces, which add in one order.
    """
    alone = any(reduction.apply or reduction.collective != "all_reduce" for reduction in reductions)
    return (group.transport,) if alone or not group.transport.clones else group.transport.clones


def bytes_of(group: Group, sends: Sequence[Sent]) -> UInt32[Array, " messages"]:
    """The bytes that each replica sent for each message, as an argument of a program; at most 2³² − 1 are told."""
    nbytes = jax.device_get([send.nbytes for send in sends])
    return group.placement.place(np.array([min(int(n), MOST) for n in nbytes], np.uint32), REPLICATED)


def sent_by_bucket(reductions: Sequence[Reduction], sent: Array, count: int) -> UInt32[Array, " count"]:
    """The bytes of each of so many buckets, in whatever messages they travel; the last number counts all else, too."""
    total = jnp.zeros(count, jnp.uint32)
    for one, nbytes in zip(reductions, sent):
        at = count - 1 if one.bucket is None else one.bucket
        total = total.at[at].set(more_sent(total[at], nbytes))
    return total


def more_sent(sent: UInt32[Array, "*messages"], nbytes: Any) -> UInt32[Array, "*messages"]:
    """Adds to bytes that were sent; more than 32 bits count is told as the most that they do.

    Example:
      >>> int(more_sent(jnp.uint32(7), 2**40)) == 2**32 - 1
      True
    """
    return sent + jnp.minimum(as_uint32(nbytes), jnp.uint32(MOST) - sent)


def by_bucket(plan: BucketPlan, sent: Array) -> Array:
    """The bytes of each bucket of a plan, in whatever messages it travels; behind them those of the scalars alone."""
    of: dict[int, list[int]] = {}
    for number, message in enumerate(plan.messages):
        of.setdefault(len(plan.buckets) if message.bucket is None else message.bucket, []).append(number)
    first, last = (np.array([of[bucket][end] for bucket in sorted(of)]) for end in (0, -1))
    more = jnp.where(first == last, 0, sent[last])
    return more_sent(sent[first], more)
