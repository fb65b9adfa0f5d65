"""Chooses the tables whose gradients travel as touched rows; `fddp.hooks` sums them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.buckets.assignment import plan_of_sent
from fddp.buckets.plan import Bucket, BucketPlan, Leaf
from fddp.buckets.sent_leaves import Rows, SentLeaf

WORTH_BYTES = 64 * 1024  # sending these takes about as long as finding the rows


def plan_with_table_rows(
    tree: PyTree,
    touched: Mapping[int, int],
    replicas: int,
    order: Sequence[SentLeaf],
    *caps: Any,
) -> BucketPlan:
    """Makes a plan that sends leaves as rows, in separate buckets, if enough bytes are saved."""
    leaves = plan_of_sent(tree, ()).leaves
    sparse: dict[int, Bucket] = {}
    for i, _, rounds in order:
        bucket = _bucket_of_rows(i, leaves[i], touched.get(i, 0), replicas)
        if bucket and rounds == 1:
            sparse[i] = bucket
    plan = plan_of_sent(tree, [sent for sent in order if sent.leaf not in sparse], *caps)
    position = {sent.leaf: k for k, sent in enumerate(order)}
    buckets = sorted(
        [*plan.buckets, *sparse.values()], key=lambda bucket: position[bucket.leaves[-1]]
    )
    return replace(plan, buckets=tuple(buckets))


def _bucket_of_rows(i: int, leaf: Leaf, touched: int, replicas: int) -> Bucket | None:
    """Returns a bucket of rows; None if it saves few bytes, or for floats of less than 16 bits."""
    if not (touched and leaf.shape and leaf.size) or jnp.finfo(leaf.dtype).bits < 16:
        return None
    rows = Rows(min(touched, leaf.shape[0]), leaf.shape[0])
    bucket = Bucket((i,), (leaf.name,), leaf.dtype, leaf.size, rows)
    # A replica sends its rows p − 1 times instead of 2 (p − 1)/p of the leaf.
    saved = (replicas - 1) * (2 * leaf.nbytes // replicas - bucket.nbytes)
    return bucket if saved >= WORTH_BYTES else None
