"""Stacked gradients that are summed round by round, in the loop over layers that makes them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.buckets.assignment import make_plan
from fddp.buckets.plan import Bucket, BucketPlan
from fddp.buckets.sent_leaves import Caps, MiB, SentLeaf
from fddp.buckets.shards import leaf_layout
from fddp.buckets.table_rows import plan_with_table_rows


def fill_rounds(
    tree: PyTree,
    loops: Mapping[int, tuple[int, int]],
    places: Mapping[int, int],
    *,
    bucket_cap_mb: Caps = 25,
    **caps: Any,
) -> dict[int, SentLeaf]:
    """Selects the stacks to sum round by round in the loop that computes them.

    These are the stacks of a loop and dtype that do not fit into a bucket. XLA sends nothing else
    while a loop with sums runs. So they are summed after the loop if at least as many bytes of
    other gradients are ready before it, and could be sent meanwhile.

    `loops` maps the index of a leaf to the place of its loop in the program and the number of
    rounds, `places` to the place of the last equation of its gradient.

    >>> import numpy as np
    >>> tree = {"head": np.zeros(256, np.float32), "kernel": np.zeros((6, 256, 256), np.float32)}
    >>> fill_rounds(tree, {1: (3, 6)}, {0: 2, 1: 3}, bucket_cap_mb=1)[1].rounds
    6
    """
    del caps
    leaves = make_plan(tree, order=()).leaves
    bytes_of = Counter[tuple[Any, int]]()  # of a dtype and loop
    for i, (place, length) in loops.items():
        if leaves[i].shape[0] == length:
            bytes_of[leaves[i].dtype, place] += leaves[i].nbytes
    cap = bucket_cap_mb[-1] if isinstance(bucket_cap_mb, Sequence) else bucket_cap_mb
    stacks = {
        i: (place, length)
        for i, (place, length) in loops.items()
        if leaves[i].shape[0] == length > 1 and bytes_of[leaves[i].dtype, place] > cap * MiB
    }

    def worth(loop: int) -> bool:
        before = sum(
            leaves[i].nbytes for i, place in places.items() if place < loop and i not in stacks
        )
        return before < sum(leaves[i].nbytes for i, (place, _) in stacks.items() if place == loop)

    return {i: SentLeaf(i, *loop) for i, loop in stacks.items() if worth(loop[0])}


def cut_in_layers(
    tree: PyTree, loops: Mapping[int, tuple[int, int]], num_shards: int
) -> dict[int, tuple[int, int]]:
    """Selects the leaves of loops whose shards are cut layer by layer."""
    leaves = jax.tree.leaves(tree)
    return {
        i: loop for i, loop in loops.items() if leaf_layout(leaves[i].shape, num_shards).depth > 1
    }


def plan_with_rounds(
    tree: PyTree,
    touched: Mapping[int, int],
    replicas: int,
    *,
    order: Sequence[SentLeaf],
    **caps: Any,
) -> BucketPlan:
    """Makes a plan in which the leaves of a loop share buckets."""
    if not any(entry.rounds > 1 for entry in order):
        indices = [entry.leaf for entry in order]
        return plan_with_table_rows(tree, touched, replicas, order=indices, **caps)
    leaf_plan = make_plan(tree, order=())
    leaves = jax.tree.leaves(tree)
    loops = {k: (x.loop, x.rounds) for k, x in enumerate(order) if x.rounds > 1}
    touched_entries = {
        k: touched[x.leaf] for k, x in enumerate(order) if k not in loops and x.leaf in touched
    }
    # Plans a list of the entries; its leaves are named by their index.
    plan = plan_with_table_rows(
        [leaves[entry.leaf] for entry in order],
        touched_entries,
        replicas,
        order=range(len(order)),
        loops=loops,
        **caps,
    )

    def of_leaves(bucket: Bucket) -> Bucket:
        entries = [order[k] for k in bucket.leaves]
        names = tuple(leaf_plan.leaves[entry.leaf].name for entry in entries)
        indices = tuple(entry.leaf for entry in entries)
        return replace(bucket, leaves=indices, names=names, rounds=entries[0].rounds)

    return replace(
        plan,
        leaves=leaf_plan.leaves,
        treedef=leaf_plan.treedef,
        buckets=tuple(map(of_leaves, plan.buckets)),
    )
