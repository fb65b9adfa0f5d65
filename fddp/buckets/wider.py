"""Plans and dtypes widened, to hold sums."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fddp.buckets.plan import BucketPlan


def widened(plan: BucketPlan, least: DTypeLike) -> BucketPlan:
    """Returns the plan with its float dtypes widened to hold all numbers of `least`."""
    leaves = tuple(replace(leaf, dtype=at_least(leaf.dtype, least)) for leaf in plan.leaves)
    buckets = tuple(replace(bucket, dtype=at_least(bucket.dtype, least)) for bucket in plan.buckets)
    return replace(plan, leaves=leaves, buckets=buckets)


def at_least(dtype: DTypeLike, least: DTypeLike) -> np.dtype:
    """Promotes a float dtype to hold all numbers of `least`; returns an integer dtype unchanged."""
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, least)
    return np.dtype(dtype)
