"""The buckets of a replica: which trained leaves travel in which message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import (
    BucketPlan,
    SentLeaf,
    fill_rounds,
    leaf_layout,
    place_scalars,
    plan_with_table_rows,
)
from fddp.comm import device_parts
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import computed_by_layer, places
from fddp.step.replica import Replica


def plan_buckets(
    replica: Replica,
    params: PyTree,
    order: Sequence[SentLeaf],
    *,
    dtype: Any = np.float32,
    touched: Mapping[int, int] | None = None,
) -> BucketPlan:
    """Plans the buckets; `touched` maps a leaf to its gradient's number of non-zero rows."""
    leaves = jax.tree.leaves(params)
    order = [x for x in order if np.size(leaves[x.leaf])]  # an empty leaf is not sent
    counts = (touched or {}) if replica.plain and replica.strategy.table_rows else {}
    tree = device_parts(replica.group.placement, params)
    options = replica.options
    caps = options.bucket_cap_mb, options.first_bucket_mb, options.last_bucket_mb
    plan = plan_with_table_rows(tree, counts, replica.group.size, order, *caps)
    if replica.strategy.scatters_grads:
        plan = replace(plan, parts=replica.group.size)
    exact = replica.strategy.exact and replica.options.hook is None
    return place_scalars(plan, dtype, early=True, exact=exact)


def provisional_plan(replica: Replica, params: PyTree) -> BucketPlan:
    """Plans the leaves in reverse, DDP's guess, until a batch shows the ready order."""
    return plan_buckets(replica, params, [SentLeaf(i) for i in replica.chosen(params)[::-1]])


def sent_in_rounds(replica: Replica, params: PyTree, program: ClosedJaxpr) -> dict[int, SentLeaf]:
    """Finds the leaves to sum round by round, in the loop over layers that makes them."""
    group = replica.group
    overlaps = group.size > 1 and (group.placement.overlaps or group.transport.in_lanes)
    in_rounds = overlaps and replica.plain and replica.strategy.rounds
    if replica.options.order == "reverse" or not in_rounds:
        return {}
    chosen = replica.chosen(params)
    by_output = computed_by_layer(program)
    loops = {chosen[k]: stack for k, stack in by_output.items() if k < len(chosen)}
    if replica.strategy.scatters_grads:  # shards that are cut layer by layer
        shapes = [np.shape(x) for x in jax.tree.leaves(params)]
        loops = {i: x for i, x in loops.items() if leaf_layout(shapes[i], group.size).depth > 1}
    ready = dict(zip(chosen, places(program)))
    return fill_rounds(params, loops, ready, bucket_cap_mb=replica.options.bucket_cap_mb)
