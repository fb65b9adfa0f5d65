"""The reductions that scatter gradients and gather parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, PyTree

from fddp.buckets import Message
from fddp.comm import Communicator
from fddp.hooks import Reduction, gathered, plain, reductions, scattered
from fddp.sharding.part_packing import ShardPlans


def scatters(plans: ShardPlans) -> tuple[Reduction, ...]:
    """The reductions of gradients: each replica receives its parts, and all of the tail."""
    hook = plans.replica.options.hook

    def scatter(message: Message, reduction: Reduction) -> Reduction:
        if message.bucket is None:
            return reduction
        if hook is not None:
            return reduction._replace(apply=partial(_part_of_sum, reduction.apply))
        return reduction._replace(apply=plain(scattered, reduction.rounds))

    return tuple(map(scatter, plans.plan.messages, reductions(plans.plan, hook)))


def scatters_of(plans: ShardPlans, micro_batch: str) -> tuple[Reduction, ...]:
    """The scatters of a micro-batch before the last: of gradients only."""
    return tuple(
        reduction._replace(name=f"{micro_batch} {reduction.name}")
        for message, reduction in zip(plans.plan.messages, scatters(plans))
        if message.bucket is not None
    )


def gathers(plans: ShardPlans, order: Sequence[int]) -> tuple[Reduction, ...]:
    """The gathers of these buckets of parameters, in this order."""
    scatter_of = {message.bucket: x for message, x in zip(plans.plan.messages, scatters(plans))}
    return tuple(Reduction(f"gather {k}", scatter_of[k].contents, plain(gathered)) for k in order)


def _part_of_sum(
    apply: Callable[..., tuple[Array, PyTree]], comm: Communicator, message: Array, memory: PyTree
) -> tuple[Array, Any]:
    """Sums the shards of all replicas by a hook; returns this replica's part."""
    total, memory = apply(comm, message.reshape(comm.size, -1), memory)
    if total.ndim == 2:
        total = total[comm.replica_index()]
    return total, memory
