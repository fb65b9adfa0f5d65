"""Packs whole leaves and parts into messages, and unpacks sums and gathered parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import (
    BucketPlan,
    Messages,
    ShardLayout,
    is_shard,
    leaves_with_shards,
    pack,
    plan_of_parts,
    take_tail,
    unpack_parts,
    unpack_received,
    whole_forms,
)
from fddp.losses import add_trees
from fddp.step import Agreed, Replica, leaf_layouts


@dataclass(frozen=True)
class ShardPlans:
    """The layouts of a replica's leaves, and the plans of the buckets that carry their parts."""

    replica: Replica
    agreed: Agreed

    @property
    def plan(self) -> BucketPlan:
        """The buckets of whole leaves."""
        return self.agreed.plan

    @cached_property
    def part_plan(self) -> BucketPlan:
        """The same buckets, with one replica's parts of the leaves."""
        return plan_of_parts(self.plan)

    @cached_property
    def leaf_layouts(self) -> list[ShardLayout]:
        """The layout of each leaf in parts of replicas."""
        return jax.tree.leaves(leaf_layouts(self.replica.group, self.agreed.common.state.params))


def unpack_sums(
    plans: ShardPlans, earlier: Sequence[Sequence[Array]], messages: Messages
) -> tuple[list[Any], Any]:
    """Adds up the scattered sums of all micro-batches; returns parts of leaves, and the tail."""
    buckets, tail = take_tail(plans.part_plan, messages)
    totals = reduce(add_trees, (*earlier, tuple(buckets)))
    return plans.plan.treedef.flatten_up_to(unpack_received(plans.part_plan, totals)), tail


def pack_parameters(plans: ShardPlans, params: PyTree, order: Sequence[int]) -> Messages:
    """Packs this replica's parts of the parameters into buckets to gather, in this order."""
    plan = plans.part_plan
    leaves = plan.treedef.flatten_up_to(params)
    for i in {i for bucket in plan.buckets for i in bucket.leaves}:
        leaves[i] = leaves[i].reshape(plan.leaves[i].shape)
    buckets = pack(plan, plan.treedef.unflatten(leaves))
    return Messages(tuple(buckets[k] for k in order), ((), None))


def unpack_parameters(
    plans: ShardPlans, params: PyTree, messages: Messages, order: Sequence[int]
) -> Any:
    """Unpacks gathered parameters into a tree with the leaves that are not gathered."""
    plan = plans.plan
    by_bucket = sorted(zip(order, messages.arrays), key=lambda pair: pair[0])
    tree = unpack_parts(plan, plans.part_plan, [array for _, array in by_bucket])
    leaves = leaves_with_shards(params)
    for i, x in enumerate(plan.treedef.flatten_up_to(tree)):
        if x is not None:
            leaves[i] = x
        elif is_shard(leaves[i]):  # leaves without elements are not gathered
            leaves[i] = jnp.zeros(leaves[i].shape, plan.leaves[i].dtype)
    return plan.treedef.unflatten(leaves)


def local_parts(plans: ShardPlans, params: PyTree) -> Any:
    """Replaces each trained leaf, whole or sharded, by this replica's part of it."""
    index = plans.replica.group.communicator.replica_index()
    chosen = set(plans.replica.chosen(whole_forms(params)))
    leaves = leaves_with_shards(params)
    for i, x in enumerate(leaves):
        if is_shard(x):
            leaves[i] = x.parts
        elif i in chosen:
            leaves[i] = plans.leaf_layouts[i].part(x, index)
    return plans.plan.treedef.unflatten(leaves)
