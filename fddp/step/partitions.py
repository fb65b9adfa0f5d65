"""The leaves that travel in several parts, because a loop over layers makes their gradients."""

from collections.abc import Mapping

from jaxtyping import PyTree

from fddp.buckets import Travelling, cut_in_layers, fill_buckets, fill_rounds
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import made_row_by_row, places, stacks
from fddp.schedules import Schedule
from fddp.step.replica import Replica

# Leaf → (loop that makes its gradient, rounds).
Loops = Mapping[int, tuple[int, int]]


def partitions_of(
    replica: Replica, params: PyTree, program: ClosedJaxpr, schedule: Schedule
) -> dict[int, list[Travelling]]:
    """Finds the leaves to send in several parts, as a loop makes their gradients.

    A schedule that cuts sends slices in separate messages. One program sends one part per round of
    the loop.
    """
    overlaps = replica.group.placement.overlaps
    in_loop = schedule.one_program and overlaps and replica.group.size > 1
    if replica.options.order == "reverse" or not (schedule.cuts or in_loop):
        return {}
    chosen = replica.chosen(params)
    if in_loop:
        by_output = made_row_by_row(program)
    else:
        by_output = stacks(program)
    loops = {chosen[k]: stack for k, stack in by_output.items() if k < len(chosen)}
    if replica.way.scattered:
        loops = cut_in_layers(params, loops, replica.group.size)
    if not in_loop:
        return _slices(replica, params, loops)
    return _rounds(replica, params, loops, dict(zip(chosen, places(program))))


def _slices(replica: Replica, params: PyTree, loops: Loops) -> dict[int, list[Travelling]]:
    """Slices the leaves of loops."""
    if not replica.travels.slices:
        return {}
    return fill_buckets(params, loops, **replica.options.bucketing)


def _rounds(
    replica: Replica, params: PyTree, loops: Loops, ready: Mapping[int, int]
) -> dict[int, list[Travelling]]:
    """Divides the leaves of loops by rounds; `ready` maps a leaf to its ready position."""
    if not replica.travels.rounds:
        return {}
    return fill_rounds(params, loops, ready, **replica.options.bucketing)
