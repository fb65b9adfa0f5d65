"""Three pieces of a step, and how they are launched.

`local` makes a replica's gradients and packs them, a reduction makes each wire's sum over replicas, `finish` uses them.
A schedule says only which of these share an XLA program and what waits for what; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from time import perf_counter
from typing import Any, NamedTuple

import jax

from fddp.buckets import Wires
from fddp.comm import EVERYWHERE, Member, lifted, lowered
from fddp.hooks import Reduction, all_summed
from fddp.sending import Memory, Sent, bytes_of, remembered, sending
from fddp.timeline import Span, Timeline


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Wires, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]
    """How each wire is summed; further ones plainly."""
    finish: Callable[[Any, Wires, Any, Any], Any]
    """(state, what came back, what was kept, bytes sent per wire) → the step's result, equal on all replicas."""


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Memory, Any], tuple[Any, Memory]]
    """(state, pending, memory, rows) → the step's result, and what to remember; state is equal everywhere, pending and
    memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """When the last step computed and communicated, where it is several programs."""


# (member, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule = Callable[[Member, Pieces, bool], Runner]


def fused(member: Member, pieces: Pieces, donate: bool) -> Runner:
    """One XLA program with an all-reduce per bucket in it; XLA's scheduler overlaps where it can (GPU, TPU).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """

    def step(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        wires, kept = pieces.local(state, pending, rows)
        mine = (*lowered(memory), *repeat((), len(wires.arrays) - len(memory)))
        totals, new, sent = all_summed(member.communicator, pieces.reductions, wires.arrays, mine)
        result = pieces.finish(state, replace(wires, arrays=totals), kept, sent)
        return result, lifted(new[: len(memory)])

    own = member.own
    program = member.program(step, (EVERYWHERE, own, own, own), (EVERYWHERE, own), donate=(0, 2) if donate else ())

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        given = (state, pending, memory, member.feed(rows))
        try:
            result = program(*given)
        except BaseException:
            program.lower(*given)  # what cannot be traced has sent nothing, and fails here once more
            member.recovery.sends()
            raise
        member.recovery.sends()
        return jax.block_until_ready(result) if member.crowded else result

    def lower(state: Any, pending: Any, memory: Memory, rows: Any) -> jax.stages.Lowered:
        return program.lower(state, pending, memory, member.feed(rows))

    return Runner(run, lower, None)


def after(member: Member, pieces: Pieces, donate: bool) -> Runner:
    """The baseline: traffic starts when the backward is done, one all-reduce at a time (paper, section 3.2.1).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    own, send = member.own, sending(member, pieces.reductions)
    local = member.program(pieces.local, (EVERYWHERE, own, own), own)
    in_specs = (EVERYWHERE, EVERYWHERE, own, EVERYWHERE)
    finish = member.program(pieces.finish, in_specs, EVERYWHERE, donate=(0,) if donate else ())
    spans: list[Span] = []

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        spans.clear()
        clock = perf_counter()
        wires, kept = jax.block_until_ready(local(state, pending, member.feed(rows)))
        spans.append(Span("compute", "backward", clock, perf_counter()))
        sends: list[Sent] = []
        for wire in wires.arrays:
            sends.append(send(len(sends), memory, lambda: sends[0], wire))
        spans.extend(one.span for one in sends)
        clock = perf_counter()
        wires = replace(wires, arrays=tuple(one.total for one in sends))
        result = jax.block_until_ready(finish(state, wires, kept, bytes_of(member, sends)))
        spans.append(Span("update", "update", clock, perf_counter()))
        return result, remembered(sends, memory)

    return Runner(run, None, lambda: Timeline(tuple(spans)))
