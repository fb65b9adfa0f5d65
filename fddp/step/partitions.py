"""The leaves that are summed round by round, in the loop over layers that makes them."""

from jaxtyping import PyTree

from fddp.buckets import SentLeaf, cut_in_layers, fill_rounds
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import computed_by_layer, places
from fddp.step.replica import Replica


def partitions_of(replica: Replica, params: PyTree, program: ClosedJaxpr) -> dict[int, SentLeaf]:
    """Finds these leaves."""
    group = replica.group
    overlaps = group.size > 1 and (group.placement.overlaps or group.transport.in_lanes)
    in_rounds = overlaps and replica.plain and replica.strategy.rounds
    if replica.options.order == "reverse" or not in_rounds:
        return {}
    chosen = replica.chosen(params)
    by_output = computed_by_layer(program)
    loops = {chosen[k]: stack for k, stack in by_output.items() if k < len(chosen)}
    if replica.strategy.scatters_grads:
        loops = cut_in_layers(params, loops, replica.group.size)
    ready = dict(zip(chosen, places(program)))
    return fill_rounds(params, loops, ready, **replica.options.bucketing)
