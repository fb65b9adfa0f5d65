"""The rule that assigns leaves to buckets.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 4.2;
`compute_bucket_assignment_by_size` in PyTorch's `reducer.cpp`.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets.messages import place_scalars
from fddp.buckets.plan import Bucket, BucketPlan, Leaf
from fddp.buckets.sent_leaves import Caps, MiB, SentLeaf, check_caps
from fddp.wording import leaf_name


def make_plan(
    tree: PyTree,
    *,
    order: Sequence[int] | None = None,
    bucket_cap_mb: Caps = 25,
    first_bucket_mb: float = 1,
    last_bucket_mb: float = 1,
) -> BucketPlan:
    """Assigns the leaves of a tree to buckets (PyTorch's `compute_bucket_assignment_by_size`).

    Leaves are taken in `order`. Each dtype fills its own bucket, which is closed when its bytes
    reach the cap. A leaf is never split, so a bucket exceeds its cap by less than one leaf. The
    first cap is small, so that communication starts early. The last bucket is split, so that at
    most `last_bucket_mb`, or one leaf, is sent after the backward pass.

    Args:
      tree: parameters, gradients or `jax.ShapeDtypeStruct`s: any tree whose leaves have a shape and
        a dtype.
      order: leaf indices in the order in which their gradients become ready (see `grad_order`).
        Leaves missing from it are not sent. None: all leaves in reverse order, DDP's guess.
      bucket_cap_mb: cap of a bucket in MiB; 0 gives every leaf its own bucket. A sequence holds one
        cap per bucket, the last for all further buckets, and the next two arguments are ignored.
      first_bucket_mb: cap of the first bucket in MiB, if less than `bucket_cap_mb`.
      last_bucket_mb: cap of the last bucket in MiB, if less than `bucket_cap_mb`.

    Returns:
      A `BucketPlan`; `print(plan)` shows it as a table.

    Raises:
      ValueError: a cap is not a number of 0 or more, or `order` is not a selection of the leaves'
        indices.
      TypeError: a leaf is neither an array nor a number, or an index in `order` is not an integer.

    Example:
      >>> import numpy as np
      >>> tree = {"w": np.zeros((256, 1024), np.float32), "b": np.zeros(1024, np.float32)}
      >>> [bucket.names for bucket in make_plan(tree, bucket_cap_mb=1).buckets]
      [('w',), ('b',)]
    """
    if isinstance(order, str) or not (order is None or hasattr(order, "__iter__")):
        raise TypeError(
            f"make_plan: order must be the numbers of leaves, from grad_order, got {order!r}."
        )
    count = len(jax.tree.leaves(tree))
    indices = range(count)[::-1] if order is None else list(map(operator.index, order))
    if len(set(indices)) != len(indices) or not all(0 <= i < count for i in indices):
        raise ValueError(
            f"order must name each leaf at most once, by its index in 0..{count - 1}, "
            f"got {list(indices)}."
        )
    caps = bucket_cap_mb, first_bucket_mb, last_bucket_mb
    return plan_of_sent(tree, list(map(SentLeaf, indices)), *caps)


def plan_of_sent(
    tree: PyTree,
    order: Sequence[SentLeaf],
    bucket_cap_mb: Caps = 25,
    first_bucket_mb: float = 1,
    last_bucket_mb: float = 1,
) -> BucketPlan:
    """Makes a plan in which buckets hold leaves of no loop, or leaves of one loop.

    Each round of a loop sends a part of its bucket, which the cap limits.
    """
    check_caps(bucket_cap_mb, first_bucket_mb, last_bucket_mb)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = tuple(_leaf(path, value) for path, value in paths)
    one_cap = isinstance(bucket_cap_mb, int | float)
    caps = [min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb] if one_cap else bucket_cap_mb
    buckets = _fill(leaves, order, [cap * MiB for cap in caps])
    if one_cap and buckets and buckets[-1][0].rounds == 1:
        last = _shorten_last(leaves, buckets, cap=min(last_bucket_mb, bucket_cap_mb) * MiB)
        buckets = _by_readiness(last, order)
    return place_scalars(
        BucketPlan(leaves, tuple(_bucket(leaves, bucket) for bucket in buckets), treedef, ())
    )


def _fill(
    leaves: Sequence[Leaf], order: Sequence[SentLeaf], caps: Sequence[float]
) -> list[list[SentLeaf]]:
    """Fills buckets: one is open per dtype and loop."""
    filling = defaultdict[Any, list[SentLeaf]](list)
    nbytes = Counter[Any]()
    closed: list[list[SentLeaf]] = []
    for sent in order:
        bucket = leaves[sent.leaf].dtype, sent.loop if sent.rounds > 1 else None
        filling[bucket].append(sent)
        nbytes[bucket] += leaves[sent.leaf].nbytes // sent.rounds
        cap = caps[min(len(closed), len(caps) - 1)]
        if nbytes[bucket] >= cap:
            closed.append(filling.pop(bucket))
            del nbytes[bucket]
    return _by_readiness([*closed, *filling.values()], order)


def _by_readiness(
    buckets: Sequence[list[SentLeaf]], order: Sequence[SentLeaf]
) -> list[list[SentLeaf]]:
    """Sorts buckets by their last leaf, which makes them ready to send."""
    position = {sent: k for k, sent in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def _shorten_last(
    leaves: Sequence[Leaf], buckets: list[list[SentLeaf]], *, cap: float
) -> list[list[SentLeaf]]:
    """Splits the last bucket: its end, which the backward pass cannot hide, fits the cap."""
    *head, last = buckets
    start = len(last) - 1
    nbytes = leaves[last[start].leaf].nbytes
    while start > 0 and (nbytes := nbytes + leaves[last[start - 1].leaf].nbytes) <= cap:
        start -= 1
    return [*head, last[:start], last[start:]] if start else buckets


def _bucket(leaves: Sequence[Leaf], sent: Sequence[SentLeaf]) -> Bucket:
    indices = tuple(x.leaf for x in sent)
    return Bucket(
        leaves=indices,
        names=tuple(leaves[i].name for i in indices),
        dtype=leaves[indices[0]].dtype,
        size=sum(leaves[i].size for i in indices),
        rounds=sent[0].rounds,
    )


def _leaf(path: jax.tree_util.KeyPath, value: Any) -> Leaf:
    name = leaf_name(path)
    form = value
    if isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        form = jax.eval_shape(lambda: jnp.asarray(value))
    if not hasattr(form, "shape") or not hasattr(form, "dtype"):
        raise TypeError(f"leaf {name!r} must be an array, got {type(value).__name__}.")
    return Leaf(name, tuple(form.shape), np.dtype(form.dtype))
