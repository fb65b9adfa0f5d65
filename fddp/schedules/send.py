"""The sum of one wire over replicas, made between programs: what the schedules of several programs send with."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from fddp.comm import EVERYWHERE, MOST, Member, lifted, lowered, psum_bytes
from fddp.hooks import PLAIN, Reduction, all_finite, summed
from fddp.jax_internals import asked_for
from fddp.schedules.timeline import Span

# What the reductions remember from step to step, one tree for each that is named.
Memory = tuple[Any, ...]


class Sent(NamedTuple):
    """A wire that has come back."""

    total: jax.Array
    memory: Any
    """What its reduction remembers."""
    nbytes: Any
    """Bytes that each replica sent."""
    span: Span
    finite: bool = True
    """Whether a hook's sum is; the same on all ranks."""


def sending(member: Member, reductions: Sequence[Reduction]) -> Callable[..., Sent]:
    """Makes a function that sends a wire and blocks the calling thread until it is back.

    Args:
      member: the replicas.
      reductions: how the first wires are summed; further ones plainly.

    Returns:
      `send(k, memory, first, wire)`: the sum of wire k; `first()` is wire 0, come back.
    """
    own, lanes = member.own, lanes_of(member, reductions)

    def program(reduction: Reduction) -> Callable[..., Any]:
        def run(wire: jax.Array, mine: Any) -> tuple[Any, Any, Any, Any]:
            total, mine, sent = summed(member.communicator, reduction, None, wire, lowered(mine))
            return total, lifted(mine), sent, all_finite(total)

        # What is remembered is not donated: `remembered` may still want it.
        return member.program(run, (own, own), (EVERYWHERE, own, EVERYWHERE, EVERYWHERE))

    programs = [program(reduction) for reduction in reductions]

    def send(k: int, memory: Memory, first: Callable[[], Sent], wire: jax.Array) -> Sent:
        start = perf_counter()
        reduction = reductions[k] if k < len(reductions) else PLAIN
        mine = memory[k] if k < len(memory) else ()
        size, finite = wire.size // member.share, True
        if reduction.leaves is not None and not jax.device_get(first().total)[list(reduction.leaves)].any():
            total, sent, size = member.place(np.zeros(size, wire.dtype), EVERYWHERE), 0, 0
        elif reduction.apply is None:
            member.recovery.sends()
            total, sent = lanes[k % len(lanes)].reduce(wire), psum_bytes(member.communicator, size, wire.dtype)
        else:
            member.recovery.sends()
            with asked_for():  # a collective of MPI takes a token along, which is new in each thread
                total, mine, sent, finite = jax.block_until_ready(programs[k](wire, mine))
        nbytes = size * wire.dtype.itemsize
        span = Span("communication", reduction.name, start, perf_counter(), nbytes)
        return Sent(total, mine, sent, span, bool(jax.device_get(finite)))

    return send


def remembered(sends: Sequence[Sent], memory: Memory) -> Memory:
    """What hooks remember when all wires are back: what they did before, if a sum is not finite (see `all_summed`)."""
    return tuple(one.memory for one in sends[: len(memory)]) if all(one.finite for one in sends) else memory


def lanes_of(member: Member, reductions: Sequence[Reduction]) -> tuple[Member, ...]:
    """What carries the wires between programs, in turn; hooks share one communicator, where two at once would mix."""
    hooked = any(reduction.apply for reduction in reductions)
    return (member,) if hooked or not member.lanes else member.lanes


def bytes_of(member: Member, sends: Sequence[Sent]) -> UInt32[jax.Array, " wires"]:
    """What each replica sent for each wire (at most 2³² − 1 bytes are told), as an argument of a program."""
    nbytes = jax.device_get([send.nbytes for send in sends])
    return member.place(np.array([min(int(n), MOST) for n in nbytes], np.uint32), EVERYWHERE)
