"""The reductions that scatter gradients and gather parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, PyTree

from fddp.buckets import Layout, Message, pack, pack_rows, true_numbers, unpack, unpack_rows
from fddp.comm import Communicator
from fddp.hooks import GradRows, Reduction, per_device, reductions
from fddp.sharding.shard_plans import ShardPlans


def scatters(plans: ShardPlans) -> tuple[Reduction, ...]:
    """The reductions of gradients: each replica receives its parts, and all of the tail."""
    group = plans.replica.group
    hook = plans.replica.options.hook

    def scatter(message: Message, reduction: Reduction) -> Reduction:
        if message.bucket is None:
            return reduction
        apply = None
        if plans.replica.travels.scatter:
            apply = partial(_sum_rows, plans, message.bucket, plans.replica.travels.scatter)
        elif reduction.apply is not None:
            apply = partial(_sum_whole_leaves, plans, message.bucket, reduction.apply)
        reduction = reduction._replace(
            collective="reduce_scatter",
            replicas=group.parts,
            apply=apply,
            # A hook has its own collectives, over all replicas.
            level="shards" if reduction.apply is None else "all",
        )
        return per_device(group.placement, reduction)

    return tuple(map(scatter, plans.plan.messages, reductions(plans.plan, hook, None)))


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
    gather = partial(
        Reduction._replace,
        collective="all_gather",
        apply=None,
        memory=None,
        level="shards",
        rounds=1,
    )
    reductions_of = (gather(scatter_of[k], name=f"gather {k}") for k in order)
    return tuple(per_device(plans.replica.group.placement, x) for x in reductions_of)


def _sum_rows(
    plans: ShardPlans,
    bucket: int,
    scatter: Callable[..., tuple[Array, PyTree]],
    comm: Communicator,
    message: Array,
    memory: PyTree,
) -> tuple[Array, Any]:
    """Sums a bucket by a hook that scatters; returns this replica's part, and new memory."""
    plan, part_plan = plans.only(bucket)
    numbers = plan.buckets[0].leaves

    def rows_of(leaves: Sequence[Array]) -> Array:
        by_number = dict(zip(numbers, leaves))
        tree = plan.treedef.unflatten(by_number.get(i) for i in range(len(plan.leaves)))
        return pack_rows(plan, part_plan, tree)[0].reshape(comm.size, -1)

    def leaves_of(rows: Array) -> list[Array]:
        tree = unpack_rows(plan, part_plan, (rows.reshape(-1),))
        leaves = plan.treedef.flatten_up_to(tree)
        return [leaves[i] for i in numbers]

    forms = tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.travelling(plan.buckets[0])
    )
    mask = true_numbers(plan, part_plan)
    rows = GradRows(message.reshape(comm.size, -1), forms, rows_of, leaves_of, mask, bucket)
    return scatter(comm, rows, memory)


def _sum_whole_leaves(
    plans: ShardPlans,
    bucket: int,
    apply: Callable[..., tuple[Array, PyTree]],
    comm: Communicator,
    message: Array,
    memory: PyTree,
) -> tuple[Array, Any]:
    """Sums a bucket by a hook of whole leaves; returns this replica's part, and new memory."""
    plan, part_plan = plans.only(bucket)
    shares = comm.at("shards")
    (flat,) = pack(plan, unpack_rows(plan, part_plan, (message,)))
    total, memory = apply(comm, flat, memory)
    (rows,) = pack_rows(plan, part_plan, unpack(plan, (total,)))
    return Layout(rows.shape, shares.size).part(rows, shares.replica_index()), memory
