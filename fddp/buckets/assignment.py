"""The rule by which leaves are assigned to buckets.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 4.2; `compute_bucket_assignment_by_size` in PyTorch's
`reducer.cpp`.
"""

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets.groups import Groups, group_keys
from fddp.buckets.plan import Bucket, BucketPlan, Leaf, MiB, place_scalars
from fddp.wording import leaf_name

# MiB: one cap for all buckets, or a cap for each in turn, of which the last holds for all that follow.
Caps: TypeAlias = float | Sequence[float]


def make_plan(
    tree: Any,
    *,
    order: Sequence[int] | None = None,
    bucket_cap_mb: Caps = 25,
    first_bucket_mb: float = 1,
    last_bucket_mb: float = 1,
    groups: Groups | None = None,
) -> BucketPlan:
    """Assigns the leaves of a tree to buckets, by the rule of PyTorch's `compute_bucket_assignment_by_size`.

    Leaves are taken in `order`; each dtype fills a bucket of its own, which is closed as soon as its bytes reach the
    cap. A leaf is never split, so a bucket exceeds its cap by less than one leaf. The first bucket's cap is small, so
    that traffic starts early. The last bucket is split so that at most `last_bucket_mb`, or one leaf, travels after
    the backward pass has ended.

    Leaves to which `groups` gives one key travel together, whatever the caps say. They share one bucket for each dtype
    that they have, which is ready with the last of its leaves.

    Args:
      tree: parameters, gradients or `jax.ShapeDtypeStruct`s: any tree whose leaves have a shape and a dtype.
      order: leaf indices in the order in which their gradients become ready (see `grad_order`); leaves that it does
        not name do not travel. None: the leaves in reverse order, DDP's guess.
      bucket_cap_mb: cap of a bucket in MiB; 0 gives every leaf a bucket of its own. A sequence has the cap of each
        bucket in turn, the last one for all that follow; the two options below are then ignored.
      first_bucket_mb: cap of the first bucket in MiB, if smaller than `bucket_cap_mb`.
      last_bucket_mb: cap of the last bucket in MiB, if smaller than `bucket_cap_mb`; a group is not cut.
      groups: maps the name of a leaf ("layers/0/kernel") to the key of its group, which is any hashable value, or to
        None: then the caps alone decide (Horovod's `groups`).

    Returns:
      A `BucketPlan`; `print(plan)` shows it as a table.

    Raises:
      ValueError: a cap is negative or NaN, or `order` is not a selection of the leaves' indices.
      TypeError: a leaf is no array, an index in `order` no whole number, or a key of `groups` not hashable.

    Example:
      >>> import numpy as np
      >>> tree = {"w": np.zeros((256, 1024), np.float32), "b": np.zeros(1024, np.float32)}
      >>> [bucket.names for bucket in make_plan(tree, bucket_cap_mb=1).buckets]
      [('w',), ('b',)]
      >>> [bucket.names for bucket in make_plan(tree, bucket_cap_mb=1, groups=lambda name: "layer").buckets]
      [('w', 'b')]
    """
    check_caps(bucket_cap_mb, first_bucket_mb, last_bucket_mb)
    if isinstance(order, str) or not (order is None or hasattr(order, "__iter__")):
        raise TypeError(f"make_plan: order must be the numbers of leaves, from grad_order, got {order!r}.")
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = tuple(_leaf(path, value) for path, value in paths)
    order = tuple(reversed(range(len(leaves)))) if order is None else tuple(operator.index(i) for i in order)
    if len(set(order)) != len(order) or not all(0 <= i < len(leaves) for i in order):
        raise ValueError(
            f"order must name each leaf at most once, by its index in 0..{len(leaves) - 1}, got {list(order)}."
        )
    keys = dict(zip(order, group_keys([leaves[i].name for i in order], groups)))
    one = isinstance(bucket_cap_mb, int | float)
    caps = [min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb] if one else bucket_cap_mb
    filled = _fill(leaves, keys, [cap * MiB for cap in caps])
    if one and filled and keys[filled[-1][0]] is None:
        filled = _by_readiness(_shorten_last(leaves, filled, cap=min(last_bucket_mb, bucket_cap_mb) * MiB), order)
    return place_scalars(BucketPlan(leaves, tuple(_bucket(leaves, bucket) for bucket in filled), treedef, ()))


def check_caps(bucket_cap_mb: Any, first_bucket_mb: Any, last_bucket_mb: Any) -> None:
    """Checks the caps that a user gave.

    Args:
      bucket_cap_mb: one cap in MiB, or a sequence of caps.
      first_bucket_mb: one cap in MiB.
      last_bucket_mb: likewise.

    Raises:
      ValueError: a cap is negative, NaN or no number, or a sequence has none.
    """
    several = isinstance(bucket_cap_mb, Sequence) and not isinstance(bucket_cap_mb, str)
    if several and not (bucket_cap_mb and all(map(_is_cap, bucket_cap_mb))):
        raise ValueError(f"bucket_cap_mb must be one cap or more, of 0 or more MiB each, got {bucket_cap_mb!r}.")
    single = {} if several else {"bucket_cap_mb": bucket_cap_mb}
    for name, cap in {**single, "first_bucket_mb": first_bucket_mb, "last_bucket_mb": last_bucket_mb}.items():
        if not _is_cap(cap):
            raise ValueError(f"{name} must be 0 or more MiB, got {cap!r}.")


def _is_cap(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0  # NaN compares false


def _fill(leaves: Sequence[Leaf], keys: Mapping[int, Hashable | None], caps: Sequence[float]) -> list[list[int]]:
    """Fills buckets in order: one is open for each dtype, and one for each dtype of a group, which no cap closes."""
    filling: dict[tuple[np.dtype, Hashable | None], list[int]] = {}
    closed: list[list[int]] = []
    for i, key in keys.items():
        bucket = filling.setdefault((leaves[i].dtype, key), [])
        bucket.append(i)
        if key is None and sum(leaves[j].nbytes for j in bucket) >= caps[min(len(closed), len(caps) - 1)]:
            closed.append(filling.pop((leaves[i].dtype, key)))
    return _by_readiness([*closed, *filling.values()], list(keys))


def _by_readiness(groups: Sequence[list[int]], order: Sequence[int]) -> list[list[int]]:
    """Sorts buckets by their last leaf, with which a bucket is ready to be sent."""
    position = {leaf: at for at, leaf in enumerate(order)}
    return sorted(groups, key=lambda bucket: position[bucket[-1]])


def _shorten_last(leaves: Sequence[Leaf], groups: list[list[int]], *, cap: float) -> list[list[int]]:
    """Splits the last bucket so that what is sent after the backward pass is within the cap, or a single leaf."""
    if not groups:
        return groups
    *others, last = groups
    cut = len(last) - 1
    while cut > 0 and sum(leaves[i].nbytes for i in last[cut - 1 :]) <= cap:
        cut -= 1
    return [*others, last[:cut], last[cut:]] if cut else groups


def _bucket(leaves: Sequence[Leaf], group: Sequence[int]) -> Bucket:
    return Bucket(
        leaves=tuple(group),
        names=tuple(leaves[i].name for i in group),
        dtype=leaves[group[0]].dtype,
        size=sum(leaves[i].size for i in group),
    )


def _leaf(path: Any, value: Any) -> Leaf:
    name = leaf_name(path)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = _scalar(name, value)
    return Leaf(name, tuple(value.shape), np.dtype(value.dtype))


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, int | float | complex):
        return jax.eval_shape(lambda: jnp.asarray(value))
    raise TypeError(f"leaf {name!r} must be an array, got {type(value).__name__}.")
