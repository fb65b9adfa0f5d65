"""How a leaf and a bucket lie in equal parts, one for each replica, so that a sum can be scattered and gathered.

A leaf is taken flat, filled up with zeros, and cut into as many parts as there are replicas. A bucket holds the first
replica's parts of its leaves, then the second one's, and so on: what a reduce-scatter gives a replica is a bucket of
its parts, on which a program that goes element by element can work, and an all-gather puts the leaves together again.

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
    """An array of which each replica holds an equal part, or a copy of its own; `fddp.whole` puts it together.

    Example:
      >>> import jax.numpy as jnp
      >>> Shard(jnp.arange(6.0), (5,))
      Shard of float32[5]
    """

    parts: Any
    """The parts, flat, in order of replicas (under MPI this rank's own), the last ones filled up; None: elsewhere."""
    shape: tuple[int, ...]
    """Of the whole array."""
    copies: bool = False
    """Whether each part is a whole array, which the replicas need not have in common."""
    ranks: tuple[int, ...] | None = None
    """The processes that hold the parts, by their number in the whole job; None: the mesh that they lie on tells."""

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
    """A tree with the form of a whole array in place of each shard."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.parts.dtype) if is_shard(x) else x, tree, is_leaf=is_shard
    )


def copy_of(ranks: tuple[int, ...] | None, x: Shaped[Array, " *dims"]) -> Shard:
    """An array that each replica on these ranks has for itself, of which this is its own; inside a program."""
    return Shard(x.reshape(-1), x.shape, copies=True, ranks=ranks)


def stacked(shard: Shard, replicas: int) -> Shard:
    """Copies as one array of all of them, along a first dim, of which each replica holds its part."""
    return replace(shard, shape=(replicas, *shard.shape), copies=False) if shard.copies else shard


def as_rows(x: Shaped[Array, " *dims"], replicas: int) -> Shaped[Array, "replicas n"]:
    """An array as its parts, one a row."""
    filled = part_size(x.size, replicas) * replicas - x.size
    return jnp.pad(x.reshape(-1), (0, filled)).reshape(replicas, -1)


def of_rows(rows: Shaped[Array, "replicas n"], shape: tuple[int, ...]) -> Shaped[Array, " *dims"]:
    """The inverse of `as_rows`."""
    return rows.reshape(-1)[: prod(shape)].reshape(shape)


def own_part(x: Shaped[Array, " *dims"], replicas: int, index: Int32[Array, ""]) -> Shaped[Array, " n"]:
    """The part of one replica."""
    return jax.lax.dynamic_index_in_dim(as_rows(x, replicas), index, keepdims=False)


def there(size: int, replicas: int, index: Int32[Array, ""]) -> Bool[Array, " n"]:
    """Which elements of a replica's part are of the array, and not filled up."""
    part = part_size(size, replicas)
    return index * part + jnp.arange(part) < size


def plan_of_parts(plan: BucketPlan) -> BucketPlan:
    """The same buckets, of one replica's parts of their leaves."""
    leaves = tuple(replace(leaf, shape=(part_size(leaf.size, plan.parts),)) for leaf in plan.leaves)
    buckets = [replace(bucket, size=sum(leaves[i].size for i in bucket.leaves)) for bucket in plan.buckets]
    return replace(plan, leaves=leaves, buckets=tuple(buckets), parts=1)


def pack_rows(of_parts: BucketPlan, replicas: int, tree: Any) -> tuple[Shaped[Array, " n"], ...]:
    """Lays whole leaves into buckets, the parts of one replica behind those of another.

    Args:
      of_parts: from `plan_of_parts`.
      replicas: how many there are.
      tree: arrays with the shapes of the whole plan's leaves, None for those that do not travel.

    Returns:
      One flat array for each bucket.
    """
    rows = jax.tree.map(lambda x: as_rows(x, replicas), tree)
    return tuple(bucket.reshape(-1) for bucket in jax.vmap(partial(pack, of_parts))(rows))


def unpack_rows(of_parts: BucketPlan, plan: BucketPlan, replicas: int, buckets: Sequence[Shaped[Array, " n"]]) -> Any:
    """The inverse of `pack_rows`.

    Args:
      of_parts: from `plan_of_parts`.
      plan: the plan that it was made of.
      replicas: how many there are.
      buckets: one flat array each.

    Returns:
      Whole leaves in the plan's tree, None for those that do not travel.
    """
    rows = jax.vmap(partial(unpack, of_parts))([bucket.reshape(replicas, -1) for bucket in buckets])
    leaves = zip(plan.leaves, plan.treedef.flatten_up_to(rows))
    return plan.treedef.unflatten([None if x is None else of_rows(x, leaf.shape) for leaf, x in leaves])


def take_apart(tree: Any) -> tuple[Any, list[Shaped[Array, " n"]]]:
    """A tree without the parts of its shards, and these in order."""
    parts = [x.parts for x in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(x)]
    return jax.tree.map(lambda x: replace(x, parts=None) if is_shard(x) else x, tree, is_leaf=is_shard), parts


def join(tree: Any, parts: Sequence[Shaped[Array, " n"]]) -> Any:
    """The inverse of `take_apart`."""
    left = iter(parts)
    return jax.tree.map(lambda x: replace(x, parts=next(left)) if is_shard(x) else x, tree, is_leaf=is_shard)
