"""Buckets of slices: what a loop over layers makes in some of its rounds travels before the loop ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fddp.buckets.assignment import Caps, make_plan
from fddp.buckets.groups import Groups, group_keys
from fddp.buckets.part_forms import depth_of
from fddp.buckets.plan import Bucket, BucketPlan, MiB, Slice, Travelling
from fddp.buckets.table_rows import plan_with_table_rows


def fill_buckets(
    tree: Any,
    loops: Mapping[int, tuple[int, int]],
    *,
    groups: Groups | None = None,
    bucket_cap_mb: Caps = 25,
    **caps: Any,
) -> dict[int, list[Travelling]]:
    """Finds how many rounds of a loop make gradients that fill a bucket.

    Args:
      tree: as for `make_plan`.
      loops: leaf index → number of the loop that makes its gradient slice by slice, and of its rounds.
      groups: as for `make_plan`; a leaf that is in a group travels whole.
      bucket_cap_mb: likewise; of several caps the last one counts.
      **caps: caps of the first and the last bucket, which do not matter here.

    Returns:
      The slices of the leaves of which a bucket holds less than all rounds.

    Example:
      >>> import numpy as np
      >>> tree = {"bias": np.zeros((6, 256), np.float32), "kernel": np.zeros((6, 256, 256), np.float32)}
      >>> [str(one.slice) for one in fill_buckets(tree, {0: (3, 6), 1: (3, 6)}, bucket_cap_mb=1)[0]]
      ['[0:3]', '[3:6]']
    """
    del caps
    leaves = make_plan(tree, order=()).leaves
    alone = [i for i in loops if group_keys([leaves[i].name], groups)[0] is None]
    free = [i for i in alone if leaves[i].shape[0] == loops[i][1] > 0]
    cap = bucket_cap_mb[-1] if isinstance(bucket_cap_mb, Sequence) else bucket_cap_mb
    made: dict[int, list[Travelling]] = {}
    for i in free:
        loop, length = loops[i]
        nbytes = sum(leaves[k].nbytes for k in free if loops[k][0] == loop) / length
        rounds = max(1, int(min(length, cap * MiB / nbytes))) if nbytes else length
        begins = range(0, length, rounds)
        if len(begins) > 1:
            made[i] = [Travelling(i, Slice(at, min(at + rounds, length)), loop) for at in begins]
    return made


def fill_rounds(
    tree: Any,
    loops: Mapping[int, tuple[int, int]],
    places: Mapping[int, int],
    *,
    groups: Groups | None = None,
    **caps: Any,
) -> dict[int, list[Travelling]]:
    """Finds the stacks that are summed in the loop that makes them, a row of each in every round.

    These are the stacks of a loop and a dtype that do not fit into a bucket. XLA sends nothing else while a loop with
    sums runs; so they are summed behind the loop if what is ready before it, and could travel meanwhile, is more.

    Args:
      tree: as for `make_plan`.
      loops: leaf index → place of the loop that makes its gradient row by row, and number of its rounds.
      places: leaf index → place of the last equation that makes its gradient.
      groups: as for `make_plan`; a leaf that is in a group travels by itself.
      **caps: as for `make_plan`.

    Returns:
      What travels of these leaves: all rounds.

    Example:
      >>> import numpy as np
      >>> tree = {"head": np.zeros(256, np.float32), "kernel": np.zeros((6, 256, 256), np.float32)}
      >>> fill_rounds(tree, {1: (3, 6)}, {0: 2, 1: 3}, bucket_cap_mb=1)[1][0].rounds
      6
    """
    leaves = make_plan(tree, order=()).leaves
    of_dtypes = [{i: loops[i] for i in loops if leaves[i].dtype == dtype} for dtype in {leaves[i].dtype for i in loops}]
    stacks = {i: some[i] for some in of_dtypes for i in fill_buckets(tree, some, groups=groups, **caps)}

    def worth(loop: int) -> bool:
        before = sum(leaves[i].nbytes for i, place in places.items() if place < loop and i not in stacks)
        return before < sum(leaves[i].nbytes for i, (other, _) in stacks.items() if other == loop)

    return {i: [Travelling(i, None, *of)] for i, of in stacks.items() if worth(of[0])}


def cut_in_layers(tree: Any, loops: Mapping[int, tuple[int, int]], parts: int) -> dict[int, tuple[int, int]]:
    """Those of the leaves that loops make which lie in parts layer by layer: of one cut as a whole no layer travels."""
    leaves = jax.tree.leaves(tree)
    return {i: loop for i, loop in loops.items() if depth_of(leaves[i].size, leaves[i].shape, parts) > 1}


def plan_with_slices(
    tree: Any,
    touched: Mapping[int, int],
    replicas: int,
    *,
    order: Sequence[Travelling],
    groups: Groups | None = None,
    **caps: Any,
) -> BucketPlan:
    """Makes a plan in which the slices that some rounds of a loop make share a bucket, for each dtype.

    Args:
      tree: as for `make_plan`.
      touched: as for `plan_with_table_rows`.
      replicas: likewise.
      order: what travels, in the order in which it becomes ready; a leaf travels whole, or in slices.
      groups: as for `make_plan`; of leaves that travel whole.
      **caps: likewise.

    Returns:
      The plan.
    """
    if not any(_by_rounds(one) for one in order):
        numbers = [one.leaf for one in order]
        return plan_with_table_rows(tree, touched, replicas, order=numbers, groups=groups, **caps)
    whole = make_plan(tree, order=())
    leaves = jax.tree.leaves(tree)
    asked = group_keys([whole.leaves[one.leaf].name for one in order], groups)
    keys = [
        ("rounds", one.loop, one.slice) if _by_rounds(one) else key and ("group", key) for one, key in zip(order, asked)
    ]
    plan = plan_with_table_rows(
        [_form(leaves[one.leaf], one) for one in order],
        {at: touched[one.leaf] for at, one in enumerate(order) if one.leaf in touched and not _by_rounds(one)},
        replicas,
        order=range(len(order)),
        groups=lambda name: keys[int(name)],
        **caps,
    )

    def of_leaves(bucket: Bucket) -> Bucket:
        inside = [order[at] for at in bucket.leaves]
        names = tuple(f"{whole.leaves[one.leaf].name}{one.slice or ''}" for one in inside)
        numbers = tuple(one.leaf for one in inside)
        rounds = inside[0].rounds
        return replace(bucket, leaves=numbers, names=names, slice=inside[0].slice, rounds=rounds)

    return replace(plan, leaves=whole.leaves, treedef=whole.treedef, buckets=tuple(map(of_leaves, plan.buckets)))


def _by_rounds(one: Travelling) -> bool:
    """Whether it shares a bucket with what the same rounds of the same loop make, whatever the caps say."""
    return one.slice is not None or one.rounds > 1


def _form(leaf: Any, one: Travelling) -> jax.ShapeDtypeStruct:
    shape = np.shape(leaf)
    return jax.ShapeDtypeStruct(shape if one.slice is None else one.slice.dims(shape), leaf.dtype)
