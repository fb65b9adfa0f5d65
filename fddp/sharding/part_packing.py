"""Packs whole leaves and parts into messages, and unpacks sums and gathered parameters."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import (
    Layout,
    Messages,
    is_shard,
    leaves_with_shards,
    pack,
    pack_rows,
    take_tail,
    unpack_received,
    unpack_rows,
    whole_forms,
)
from fddp.losses import add_trees
from fddp.sharding.shard_plans import ShardPlans


def pack_gradients(plans: ShardPlans, grads: PyTree) -> tuple[Array, ...]:
    """Packs whole gradients into the buckets to scatter."""
    plan = plans.plan

    def pack_local(leaves: list[Any]) -> tuple[Array, ...]:
        tree = plan.treedef.unflatten(leaves)
        return pack_rows(plan, plans.part_plan, tree)

    pack_all = plans.by_device(pack_local, (plans.specs("spec"),), plans.message_spec)
    return pack_all(plans.travelling(grads))


def unpack_sums(
    plans: ShardPlans, earlier: Sequence[Sequence[Array]], messages: Messages
) -> tuple[list[Any], Any]:
    """Adds up the scattered sums of all micro-batches; returns parts of leaves, and the tail."""
    buckets, tail = take_tail(plans.part_plan, messages)
    totals = reduce(add_trees, (*earlier, tuple(buckets)))

    def unpack_local(buckets: Sequence[Array]) -> list[Any]:
        leaves = plans.plan.treedef.flatten_up_to(unpack_received(plans.part_plan, buckets))
        return _map_sent(_with_dim_of_rows, leaves, plans.leaf_layouts)

    unpack_all = plans.by_device(unpack_local, (plans.message_spec,), plans.specs("rows"))
    return unpack_all(totals), tail


def pack_parameters(plans: ShardPlans, params: PyTree, order: Sequence[int]) -> Messages:
    """Packs this replica's parts of the parameters into buckets to gather, in this order."""
    plan = plans.part_plan

    def pack_local(leaves: list[Any]) -> tuple[Array, ...]:
        local = _map_sent(lambda x, leaf: x.reshape(leaf.shape), leaves, plan.leaves)
        buckets = pack(plan, plan.treedef.unflatten(local))
        return tuple(buckets[k] for k in order)

    pack_all = plans.by_device(pack_local, (plans.specs("rows"),), plans.message_spec)
    return Messages(pack_all(plans.travelling(params)), ((), None))


def unpack_parameters(
    plans: ShardPlans, params: PyTree, messages: Messages, order: Sequence[int]
) -> Any:
    """Unpacks gathered parameters into a tree with the leaves that are not gathered."""
    plan = plans.plan
    by_bucket = sorted(zip(order, messages.arrays), key=lambda pair: pair[0])

    def unpack_local(buckets: Sequence[Array]) -> list[Any]:
        return plan.treedef.flatten_up_to(unpack_rows(plan, plans.part_plan, buckets))

    unpack_all = plans.by_device(unpack_local, (plans.message_spec,), plans.specs("spec"))
    received = unpack_all([array for _, array in by_bucket])
    leaves = leaves_with_shards(params)
    for i, x in enumerate(received):
        if x is not None:
            leaves[i] = x
        elif is_shard(leaves[i]):  # leaves without elements are not gathered
            leaves[i] = jnp.zeros(leaves[i].shape, plan.leaves[i].dtype)
    return plan.treedef.unflatten(leaves)


def local_parts(plans: ShardPlans, params: PyTree) -> Any:
    """Replaces each trained leaf, whole or sharded, by this replica's part of it."""
    index = plans.replica.group.communicator.at("shards").replica_index()
    chosen = set(plans.replica.chosen(whole_forms(params)))
    leaves = leaves_with_shards(params)
    for i, x in enumerate(leaves):
        if is_shard(x):
            leaves[i] = x.parts
        elif i in chosen:
            leaves[i] = plans.leaf_layouts[i].part(x, index)
    return plans.plan.treedef.unflatten(leaves)


def _map_sent(f: Callable[..., Array], leaves: Sequence[Any], *more: Sequence[Any]) -> list[Any]:
    """Maps a function over leaves; None for leaves that are not sent."""
    return [None if x is None else f(x, *args) for x, *args in zip(leaves, *more)]


def _with_dim_of_rows(x: Array, layout: Layout) -> Array:
    """Adds the dim along which the rows of a replica's devices are concatenated."""
    return x.reshape(-1, x.shape[-1]) if layout.cut.dims else x
