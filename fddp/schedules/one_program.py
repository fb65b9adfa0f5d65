"""The fused schedule: one XLA program, whose scheduler overlaps where it can."""

from dataclasses import replace
from typing import Any

import jax

from fddp.comm import REPLICATED, Group, add_replica_dim, drop_replica_dim
from fddp.hooks import Memory, all_summed
from fddp.schedules.pieces import Pieces, Runner


def fused(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """One XLA program with an all-reduce per bucket in it; XLA's scheduler overlaps where it can (GPU, TPU).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """

    def step(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        wires, kept = pieces.local(state, pending, rows)
        mine = drop_replica_dim(memory) or ((),) * len(wires.arrays)
        totals, new, sent = all_summed(group.communicator, pieces.reductions, wires.arrays, mine)
        result = pieces.finish(state, replace(wires, arrays=totals), kept, sent)
        return result, add_replica_dim(new[: len(memory)])

    own = group.placement.per_replica
    program = group.placement.program(
        step, (REPLICATED, own, own, own), (REPLICATED, own), donate=(0, 2) if donate else ()
    )

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        given = (state, pending, memory, group.placement.feed(rows))
        try:
            result = program(*given)
        except BaseException:
            program.lower(*given)  # what cannot be traced has sent nothing, and fails here once more
            group.recovery.sends()
            raise
        group.recovery.sends()
        return jax.block_until_ready(result) if group.placement.shares_cores else result

    def lower(state: Any, pending: Any, memory: Memory, rows: Any) -> jax.stages.Lowered:
        return program.lower(state, pending, memory, group.placement.feed(rows))

    return Runner(run, lower, None)
