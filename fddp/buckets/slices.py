"""Slices of stacked gradients, sent in separate buckets before their loop over layers ends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets.assignment import make_plan
from fddp.buckets.plan import Bucket, BucketPlan
from fddp.buckets.shard_layout import leaf_layout
from fddp.buckets.table_rows import plan_with_table_rows
from fddp.buckets.travelling import Caps, MiB, Slice, Travelling


def fill_buckets(
    tree: PyTree,
    loops: Mapping[int, tuple[int, int]],
    *,
    bucket_cap_mb: Caps = 25,
    **caps: Any,
) -> dict[int, list[Travelling]]:
    """Cuts stacked gradients into slices of as many rounds as fill a bucket.

    `loops` maps the index of a leaf to the number of the loop that computes its gradient slice by
    slice, and to the number of rounds. Loops whose rounds all fit into one bucket are left
    out. Of several caps the last one counts.

    >>> import numpy as np
    >>> tree = {"bias": np.zeros((6, 256), "f4"), "kernel": np.zeros((6, 256, 256), "f4")}
    >>> slices = fill_buckets(tree, {0: (3, 6), 1: (3, 6)}, bucket_cap_mb=1)
    >>> [str(entry.slice) for entry in slices[0]]
    ['[0:3]', '[3:6]']
    """
    del caps
    leaves = make_plan(tree, order=()).leaves
    if isinstance(bucket_cap_mb, Sequence):
        bucket_cap_mb = bucket_cap_mb[-1]
    stacks = list[int]()
    loop_bytes = Counter[int]()
    for i, (loop, length) in loops.items():
        if leaves[i].shape[0] == length > 0:
            stacks.append(i)
            loop_bytes[loop] += leaves[i].nbytes
    slices: dict[int, list[Travelling]] = {}
    for i in stacks:
        loop, length = loops[i]
        rounds = length
        if nbytes := loop_bytes[loop] / length:
            rounds = max(1, int(min(length, bucket_cap_mb * MiB / nbytes)))
        begins = range(0, length, rounds)
        if len(begins) > 1:
            slices[i] = [Travelling(i, Slice(k, min(k + rounds, length)), loop) for k in begins]
    return slices


def fill_rounds(
    tree: PyTree,
    loops: Mapping[int, tuple[int, int]],
    places: Mapping[int, int],
    **caps: Any,
) -> dict[int, list[Travelling]]:
    """Selects the stacks to sum round by round in the loop that computes them.

    These are the stacks of a loop and dtype that do not fit into a bucket. XLA sends nothing else
    while a loop with sums runs. So they are summed after the loop if at least as many bytes of
    other gradients are ready before it, and could be sent meanwhile.

    `loops` maps the index of a leaf to the place of its loop in the program and the number of
    rounds, `places` to the place of the last equation of its gradient.

    >>> import numpy as np
    >>> tree = {"head": np.zeros(256, np.float32), "kernel": np.zeros((6, 256, 256), np.float32)}
    >>> fill_rounds(tree, {1: (3, 6)}, {0: 2, 1: 3}, bucket_cap_mb=1)[1][0].rounds
    6
    """
    leaves = make_plan(tree, order=()).leaves
    stacks: dict[int, tuple[int, int]] = {}
    for dtype in {leaves[i].dtype for i in loops}:
        same_dtype = {i: loop for i, loop in loops.items() if leaves[i].dtype == dtype}
        slices = fill_buckets(tree, same_dtype, **caps)
        stacks |= {i: loops[i] for i in slices}

    def worth(loop: int) -> bool:
        before = sum(
            leaves[i].nbytes for i, place in places.items() if place < loop and i not in stacks
        )
        return before < sum(leaves[i].nbytes for i, (place, _) in stacks.items() if place == loop)

    return {i: [Travelling(i, None, *loop)] for i, loop in stacks.items() if worth(loop[0])}


def cut_in_layers(
    tree: PyTree, loops: Mapping[int, tuple[int, int]], num_shards: int
) -> dict[int, tuple[int, int]]:
    """Selects the leaves of loops whose shards are cut layer by layer: others have no slices."""
    leaves = jax.tree.leaves(tree)
    return {
        i: loop for i, loop in loops.items() if leaf_layout(leaves[i].shape, num_shards).depth > 1
    }


def plan_with_slices(
    tree: PyTree,
    touched: Mapping[int, int],
    replicas: int,
    *,
    order: Sequence[Travelling],
    **caps: Any,
) -> BucketPlan:
    """Makes a plan in which the slices of the same rounds of a loop share a bucket per dtype.

    `order` lists whole leaves and slices as they become ready. The further
    arguments are those of `plan_with_table_rows`.
    """
    if not any(_by_rounds(entry) for entry in order):
        indices = [entry.leaf for entry in order]
        return plan_with_table_rows(tree, touched, replicas, order=indices, **caps)
    leaf_plan = make_plan(tree, order=())
    leaves = jax.tree.leaves(tree)
    together = {k: (x.loop, x.slice) for k, x in enumerate(order) if _by_rounds(x)}
    touched_entries = {
        k: touched[x.leaf] for k, x in enumerate(order) if k not in together and x.leaf in touched
    }
    # Plans a list of the entries; its leaves are named by their index.
    plan = plan_with_table_rows(
        [_form(leaves[entry.leaf], entry) for entry in order],
        touched_entries,
        replicas,
        order=range(len(order)),
        together=together,
        **caps,
    )

    def of_leaves(bucket: Bucket) -> Bucket:
        entries = [order[k] for k in bucket.leaves]
        names = tuple(
            f"{leaf_plan.leaves[entry.leaf].name}{entry.slice or ''}" for entry in entries
        )
        indices = tuple(entry.leaf for entry in entries)
        rounds = entries[0].rounds
        return replace(bucket, leaves=indices, names=names, slice=entries[0].slice, rounds=rounds)

    return replace(
        plan,
        leaves=leaf_plan.leaves,
        treedef=leaf_plan.treedef,
        buckets=tuple(map(of_leaves, plan.buckets)),
    )


def _by_rounds(entry: Travelling) -> bool:
    """True if the entry shares a bucket with the same rounds of its loop, whatever the caps."""
    return entry.slice is not None or entry.rounds > 1


def _form(leaf: jax.Array | jax.ShapeDtypeStruct, entry: Travelling) -> jax.ShapeDtypeStruct:
    shape = np.shape(leaf)
    return jax.ShapeDtypeStruct(
        shape if entry.slice is None else entry.slice.dims(shape), leaf.dtype
    )
