"""The baseline: one thing after the other."""

from dataclasses import replace
from time import perf_counter
from typing import Any

import jax

from fddp.comm import REPLICATED, Group
from fddp.hooks import Memory
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.send import Sent, bytes_of, remembered, sending
from fddp.schedules.timeline import Span, Timeline


def after(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """The baseline: traffic starts when the backward is done, one all-reduce at a time (paper, section 3.2.1).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    own, send = group.placement.per_replica, sending(group, pieces.reductions)
    local = group.placement.program(pieces.local, (REPLICATED, own, own), own)
    in_specs = (REPLICATED, REPLICATED, own, REPLICATED)
    finish = group.placement.program(pieces.finish, in_specs, REPLICATED, donate=(0,) if donate else ())
    spans: list[Span] = []

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        spans.clear()
        clock = perf_counter()
        wires, kept = jax.block_until_ready(local(state, pending, group.placement.feed(rows)))
        spans.append(Span("compute", "backward", clock, perf_counter()))
        sends: list[Sent] = []
        for wire in wires.arrays:
            sends.append(send(len(sends), memory, lambda: sends[0], wire))
        spans.extend(one.span for one in sends)
        clock = perf_counter()
        wires = replace(wires, arrays=tuple(one.total for one in sends))
        result = jax.block_until_ready(finish(state, wires, kept, bytes_of(group, sends)))
        spans.append(Span("update", "update", clock, perf_counter()))
        return result, remembered(sends, memory)

    return Runner(run, None, lambda: Timeline(tuple(spans)))
