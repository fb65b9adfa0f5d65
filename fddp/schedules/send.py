"""Sums one message over the replicas between programs, for schedules of several programs."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jaxtyping import Array, PyTree, UInt32

from fddp.buckets import BucketPlan
from fddp.comm import (
    MOST,
    REPLICATED,
    Group,
    Transport,
    add_replica_dim,
    as_uint32,
    drop_replica_dim,
)
from fddp.hooks import Reduction, all_finite, plain_bytes, summed
from fddp.jax_internals import asked_for
from fddp.schedules.timeline import Span


class Sent(NamedTuple):
    """A message that has arrived."""

    total: Any
    memory: Any
    """The memory of its hook."""
    nbytes: Any
    """Bytes that each replica sent."""
    span: Span
    reduction: Reduction
    finite: bool
    """False if a hook's sum is not finite; the same on all ranks."""


def sending(group: Group, reductions: Sequence[Reduction]) -> Callable[..., Sent]:
    """Makes a function that sends message k and blocks the calling thread until its sum arrives.

    It takes (k, memory of the hook, function that returns the sum which decides whether this
    message is needed, message).
    """
    transports = side_by_side(group, reductions)
    programs = [_hook_program(group, reduction) for reduction in reductions]

    def send(k: int, memory: PyTree, flags: Callable[[], jax.Array], message: jax.Array) -> Sent:
        reduction = reductions[k]
        transport = transports[k % len(transports)]
        size = message.size // group.placement.replicas_in_array
        finite = True
        start = perf_counter()
        if not _is_needed(reduction, flags):
            total = group.placement.place(np.zeros(size, message.dtype), REPLICATED)
            sent = size = 0
        else:
            journal = group.journal.message(reduction.title, size * message.dtype.itemsize)
            with TraceAnnotation(reduction.name), journal:
                if reduction.hooked is None:
                    collective = getattr(transport, reduction.collective.kind)
                    total = collective(message)
                    sent = plain_bytes(group.communicator, reduction, size, message.dtype)
                else:
                    with asked_for():  # a collective of MPI takes a token; each thread has its own
                        outputs = jax.block_until_ready(programs[k](message, memory))
                    total, memory, sent, finite = outputs
        nbytes = size * message.dtype.itemsize
        span = Span("communication", reduction.name, start, perf_counter(), nbytes)
        return Sent(total, memory, sent, span, reduction, bool(jax.device_get(finite)))

    return send


def _hook_program(group: Group, reduction: Reduction) -> Callable[..., Any]:
    """The program of a reduction by a hook: (message, memory) → sum, memory, bytes, finite."""
    per_replica = group.placement.per_replica

    def run(message: jax.Array, memory: PyTree) -> tuple[Any, Any, Any, Any]:
        comm = group.transport.inside
        total, memory, sent = summed(comm, reduction, None, message, drop_replica_dim(memory))
        finite = all_finite([total])
        return total, add_replica_dim(memory), sent, finite

    sum_spec = REPLICATED
    if reduction.collective.kind == "reduce_scatter":
        sum_spec = per_replica
    out_specs = sum_spec, per_replica, REPLICATED, REPLICATED
    # The memory is not donated: `remembered` may return it.
    program = group.transport.program or group.placement.program
    return program(run, (per_replica, per_replica), out_specs)


def _is_needed(reduction: Reduction, flags: Callable[[], jax.Array]) -> bool:
    if reduction.asks is None:
        return True
    return bool(jax.device_get(flags())[list(reduction.asks.places)].any())


def side_by_side(group: Group, reductions: Sequence[Reduction]) -> tuple[Transport, ...]:
    """The transports that send the messages between programs, in round-robin order.

    Hooks share one communicator, where two would mix. So do reduce-scatters and all-gathers, whose
    parts lie in one order of the replicas.
    """
    ordered = any(r.hooked or r.collective.kind != "all_reduce" for r in reductions)
    if ordered or not group.transport.clones:
        return (group.transport,)
    return group.transport.clones


def bytes_of(group: Group, messages: Sequence[Sent]) -> UInt32[Array, " messages"]:
    """Bytes that each replica sent for each message, at most 2³² − 1, as a program's argument."""
    nbytes = jax.device_get([message.nbytes for message in messages])
    capped = np.array([min(int(n), MOST) for n in nbytes], np.uint32)
    return group.placement.place(capped, REPLICATED)


def more_sent(sent: UInt32[Array, "*messages"], nbytes: Any) -> UInt32[Array, "*messages"]:
    """Adds to a number of bytes, and saturates at 32 bits.

    Example:
      >>> int(more_sent(jnp.uint32(7), 2**40)) == 2**32 - 1
      True
    """
    return sent + jnp.minimum(as_uint32(nbytes), jnp.uint32(MOST) - sent)


def by_bucket(plan: BucketPlan, sent: Array) -> Array:
    """Bytes of each bucket of a plan over all its messages, followed by those of the scalars."""
    numbers: dict[int, list[int]] = {}
    for number, message in enumerate(plan.messages):
        bucket = message.bucket
        if bucket is None:
            bucket = len(plan.buckets)
        numbers.setdefault(bucket, []).append(number)
    first, last = (np.array([numbers[b][end] for b in sorted(numbers)]) for end in (0, -1))
    more = jnp.where(first == last, 0, sent[last])
    return more_sent(sent[first], more)
