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
        bucket = _bucket_of_rows(i, leaves[i], touched.get(i, 0))
        if bucket and rounds == 1 and _saved(bucket, leaves[i], replicas) >= WORTH_BYTES:
            sparse[i] = bucket
    plan = plan_of_sent(tree, [sent for sent in order if sent.leaf not in sparse], *caps)
    position = {sent.leaf: k for k, sent in enumerate(order)}
    buckets = sorted(
        [*plan.buckets, *sparse.values()], key=lambda bucket: position[bucket.leaves[-1]]
    )
    return replace(plan, buckets=tuple(buckets))


def _bucket_of_rows(i: int, leaf: Leaf, touched: int) -> Bucket | None:
    """Returns a bucket of rows; None if no row is touched, or for floats of less than 16 bits."""
    if not (touched and leaf.shape and leaf.size) or jnp.finfo(leaf.dtype).bits < 16:
        return None
    return Bucket(
        (i,), (leaf.name,), leaf.dtype, leaf.size, Rows(min(touched, leaf.shape[0]), leaf.shape[0])
    )


def _saved(rows: Bucket, leaf: Leaf, replicas: int) -> int:
    """Bytes saved per replica: it sends its rows p − 1 times instead of 2 (p − 1)/p of the leaf."""
    return (replicas - 1) * (2 * leaf.nbytes // replicas - rows.nbytes)
