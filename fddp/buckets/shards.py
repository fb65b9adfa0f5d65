"""Cuts leaves and buckets into equal parts, one for each replica, so that a sum can be scattered and gathered.

A leaf is taken flat, padded with zeros, and cut into as many parts as there are replicas. A bucket holds the first
replica's parts of its leaves, then the second one's, and so on. So a reduce-scatter gives a replica the bucket of its
parts, on which an elementwise program can work, and an all-gather puts the leaves together again.

Source: ZeRO (Rajbhandari et al., SC 2020); the flat parameters of PyTorch's FullyShardedDataParallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from fddp.buckets.packing import pack, unpack
from fddp.buckets.plan import BucketPlan, part_size


@dataclass(frozen=True)
class Shard:
    """An array that is spread over replicas: each holds an equal part, or a copy of its own. `fddp.whole` joins them.

    Example:
      >>> import jax.numpy as jnp
      >>> Shard(jnp.arange(6.0), (5,))
      Shard of float32[5]
    """

    parts: Any
    """The parts, flat, in order of replicas (under MPI this rank's own), with padding at the end; None: taken out."""
    shape: tuple[int, ...]
    """Dims of the whole array."""
    copies: bool = False
    """Whether each part is a whole array, which may differ between replicas."""
    ranks: tuple[int, ...] | None = None
    """The processes that hold the parts, by their number in the whole job; None: the arrays' own mesh names them."""

    def __repr__(self) -> str:
        kind = "Copies" if self.copies else "Shard"
        if hasattr(self.parts, "dtype"):
            return f"{kind} of {self.parts.dtype}{list(self.shape)}"
        held = "" if self.parts is None else f", {self.parts!r} in place of its parts"  # a function was mapped over it
        return f"{kind} of shape {list(self.shape)}{held}"


jax.tree_util.register_dataclass(Shard, data_fields=["parts"], meta_fields=["shape", "copies", "ranks"])


def is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def whole_forms(tree: Any) -> Any:
    """The same tree with the shape and dtype of the whole array in place of each shard."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.parts.dtype) if is_shard(x) else x, tree, is_leaf=is_shard
    )


def copy_of(ranks: tuple[int, ...] | None, x: Shaped[Array, " *dims"]) -> Shard:
    """Makes a shard of copies from this replica's own array; inside a program."""
    return Shard(x.reshape(-1), x.shape, copies=True, ranks=ranks)


def stacked(shard: Shard, replicas: int) -> Shard:
    """A shard of one array that stacks the copies along a first dim, so that each replica holds a part of it."""
    return replace(shard, shape=(replicas, *shard.shape), copies=False) if shard.copies else shard


def as_rows(x: Shaped[Array, " *dims"], replicas: int) -> Shaped[Array, "replicas n"]:
    """Cuts an array into parts, one for each replica: the rows of the result."""
    filled = part_size(x.size, replicas) * replicas - x.size
    return jnp.pad(x.reshape(-1), (0, filled)).reshape(replicas, -1)


def of_rows(rows: Shaped[Array, "replicas n"], shape: tuple[int, ...]) -> Shaped[Array, " *dims"]:
    """Puts the parts of an array together: the inverse of `as_rows`."""
    return rows.reshape(-1)[: prod(shape)].reshape(shape)


def own_part(x: Shaped[Array, " *dims"], replicas: int, index: Int32[Array, ""]) -> Shaped[Array, " n"]:
    """The part of an array that replica `index` holds."""
    return jax.lax.dynamic_index_in_dim(as_rows(x, replicas), index, keepdims=False)


def there(size: int, replicas: int, index: Int32[Array, ""]) -> Bool[Array, " n"]:
    """Marks the elements of a replica's part that belong to the array; the others are padding."""
    part = part_size(size, replicas)
    return index * part + jnp.arange(part) < size


def plan_of_parts(plan: BucketPlan) -> BucketPlan:
    """The plan of the same buckets, each with one replica's parts of its leaves."""
    leaves = tuple(replace(leaf, shape=(part_size(leaf.size, plan.parts),)) for leaf in plan.leaves)
    buckets = [replace(bucket, size=sum(leaves[i].size for i in bucket.leaves)) for bucket in plan.buckets]
    return replace(plan, leaves=leaves, buckets=tuple(buckets), parts=1)


def pack_rows(of_parts: BucketPlan, replicas: int, tree: Any) -> tuple[Shaped[Array, " n"], ...]:
    """Lays whole leaves into buckets, the parts of each replica behind those of the replica before it.

    Args:
      of_parts: the plan from `plan_of_parts`.
      replicas: number of replicas.
      tree: arrays with the shapes of the whole plan's leaves, None for those that do not travel.

    Returns:
      One flat array for each bucket.
    """
    rows = jax.tree.map(lambda x: as_rows(x, replicas), tree)
    return tuple(bucket.reshape(-1) for bucket in jax.vmap(partial(pack, of_parts))(rows))


def unpack_rows(of_parts: BucketPlan, plan: BucketPlan, replicas: int, buckets: Sequence[Shaped[Array, " n"]]) -> Any:
    """Takes whole leaves out of buckets: the inverse of `pack_rows`.

    Args:
      of_parts: the plan from `plan_of_parts`.
      plan: the plan that it was made of.
      replicas: number of replicas.
      buckets: one flat array for each bucket.

    Returns:
      Whole leaves in the plan's tree, None for those that do not travel.
    """
    rows = jax.vmap(partial(unpack, of_parts))([bucket.reshape(replicas, -1) for bucket in buckets])
    leaves = zip(plan.leaves, plan.treedef.flatten_up_to(rows))
    return plan.treedef.unflatten([None if x is None else of_rows(x, leaf.shape) for leaf, x in leaves])


def take_apart(tree: Any) -> tuple[Any, list[Shaped[Array, " n"]]]:
    """Takes the parts out of a tree's shards.

    Args:
      tree: a tree in which some values are shards.

    Returns:
      The tree with None in place of the parts, and the parts in order.
    """
    parts = [x.parts for x in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(x)]
    return jax.tree.map(lambda x: replace(x, parts=None) if is_shard(x) else x, tree, is_leaf=is_shard), parts


def join(tree: Any, parts: Sequence[Shaped[Array, " n"]]) -> Any:
    """Puts parts into the shards of a tree again: the inverse of `take_apart`."""
    left = iter(parts)
    return jax.tree.map(lambda x: replace(x, parts=next(left)) if is_shard(x) else x, tree, is_leaf=is_shard)
