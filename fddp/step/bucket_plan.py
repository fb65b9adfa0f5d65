"""The buckets of a replica: which trained leaves travel in which message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import BucketPlan, SentLeaf, place_scalars, plan_with_rounds
from fddp.comm import device_parts
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
    counts = {}
    if touched and replica.plain and replica.strategy.table_rows:
        counts = touched
    tree = device_parts(replica.group.placement, params)
    plan = plan_with_rounds(
        tree, counts, replica.group.size, order=order, **replica.options.bucketing
    )
    if replica.strategy.scatters_grads:
        plan = replace(plan, parts=replica.group.size)
    exact = replica.strategy.exact and replica.options.hook is None
    return place_scalars(plan, dtype, early=True, exact=exact)


def provisional_plan(replica: Replica, params: PyTree) -> BucketPlan:
    """Plans the leaves in reverse, DDP's guess, until a batch shows the ready order."""
    return plan_buckets(replica, params, [SentLeaf(i) for i in replica.chosen(params)[::-1]])
