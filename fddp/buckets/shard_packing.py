"""Packs leaves into buckets of equal parts, one per replica, for reduce-scatter and all-gather.

A bucket holds the parts of its leaves for the first replica, then those for the second, and so on.
So a reduce-scatter gives each replica the bucket of its parts, on which elementwise programs can
work, and an all-gather restores the leaves.

Source: ZeRO (Rajbhandari et al., SC 2020); the flat parameters of PyTorch's
FullyShardedDataParallel.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jaxtyping import Array, PyTree, Shaped

from fddp.buckets.packing import concatenated, put_together
from fddp.buckets.plan import Bucket, BucketPlan
from fddp.buckets.shards import ShardLayout, leaf_layout


def plan_of_parts(plan: BucketPlan) -> BucketPlan:
    """Returns the same plan for the parts of one replica."""
    leaves = tuple(
        replace(leaf, shape=leaf_layout(leaf.shape, plan.parts).dims) for leaf in plan.leaves
    )
    part_plan = replace(plan, leaves=leaves, parts=1)
    buckets = [
        replace(bucket, size=sum(x.size for x in part_plan.leaves_of(bucket)))
        for bucket in plan.buckets
    ]
    return replace(part_plan, buckets=tuple(buckets))


def pack_parts(
    plan: BucketPlan, part_plan: BucketPlan, tree: PyTree
) -> tuple[Shaped[Array, " n"], ...]:
    """Packs whole leaves into flat buckets that concatenate the packed parts of all replicas.

    A bucket in rounds concatenates its rounds, each packed in this way. `part_plan` is the result
    of `plan_of_parts`.
    """
    leaves = plan.treedef.flatten_up_to(tree)

    def packed(bucket: Bucket) -> Array:
        layouts = _layouts(plan, part_plan, bucket)
        arrays = [leaves[i] for i in bucket.leaves]

        def pack_round(*arrays: Array) -> Array:
            rows = [
                ShardLayout(x.shape, plan.parts, layout.depth // bucket.rounds).split(x)
                for x, layout in zip(arrays, layouts)
            ]
            return jax.vmap(partial(concatenated, dtype=bucket.dtype))(rows).reshape(-1)

        if bucket.rounds == 1:
            return pack_round(*arrays)
        return jax.vmap(pack_round)(*arrays).reshape(-1)

    return tuple(map(packed, plan.buckets))


def unpack_parts(
    plan: BucketPlan, part_plan: BucketPlan, buckets: Sequence[Shaped[Array, " n"]]
) -> Any:
    """Unpacks whole leaves: the inverse of `pack_parts`, except for buckets in rounds.

    Of a bucket in rounds `pack_parts` concatenates the rounds. Here the packed parts of replicas
    are concatenated, as an all-gather returns them.
    """

    def whole_leaves(bucket: Bucket, flat: Array) -> list[Array]:
        layouts = _layouts(plan, part_plan, bucket)
        rounds = flat.reshape(plan.parts, bucket.rounds, -1)
        sizes = [prod(layout.dims) // bucket.rounds for layout in layouts]
        rows = jax.lax.split(rounds, sizes, axis=2)
        return [
            layout.join(x.reshape(plan.parts, *layout.dims)) for x, layout in zip(rows, layouts)
        ]

    return put_together(plan, map(whole_leaves, plan.buckets, buckets))


def _layouts(plan: BucketPlan, part_plan: BucketPlan, bucket: Bucket) -> list[ShardLayout]:
    """Returns the layouts of the leaves in a bucket."""
    pairs = zip(plan.leaves_of(bucket), part_plan.leaves_of(bucket))
    return [ShardLayout(leaf.shape, plan.parts, prod(part.shape[:-1])) for leaf, part in pairs]
