"""Cuts leaves and buckets into equal parts, one for each replica, so that a sum can be scattered and gathered.

A leaf is taken flat, padded with zeros, and cut into as many parts as there are replicas. Of a stack each layer is cut
so, by itself: some layers of a replica's part are then its part of these layers, and can travel alone. A bucket holds
the first replica's parts of its leaves, then the second one's, and so on. So a reduce-scatter gives a replica the
bucket of its parts, on which an elementwise program can work, and an all-gather puts the leaves together again.

Source: ZeRO (Rajbhandari et al., SC 2020); the flat parameters of PyTorch's FullyShardedDataParallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32, Shaped

from fddp.buckets.by_device import UNCUT, DeviceCut, by_device
from fddp.buckets.packing import joined, put_together, taken
from fddp.buckets.part_forms import part_dims, part_of
from fddp.buckets.plan import Bucket, BucketPlan, Leaf


@dataclass(frozen=True)
class Shard:
    """An array that is spread over replicas: each holds an equal part, or a copy of its own. `fddp.whole` joins them.

    Example:
      >>> import jax.numpy as jnp
      >>> Shard(jnp.arange(6.0), (5,))
      Shard of float32[5]
    """

    parts: Any
    """The parts in order of replicas (under MPI this rank's own), flat or in several rows, with padding at the ends;
    None: taken out."""
    shape: tuple[int, ...]
    """Dims of the whole array."""
    copies: bool = False
    """Whether each part is a whole array, which may differ between replicas."""
    ranks: tuple[int, ...] | None = None
    """The processes that hold the parts, by their number in the whole job; None: the arrays' own mesh names them."""
    depth: int = 1
    """Number of rows that are cut each by itself, the layers of a stack, say; 1: the array is cut as a whole."""
    nodes: tuple[tuple[int, ...], ...] | None = None
    """The replicas of each node, where the parts of every node make up the array; None: those of all replicas do, or
    this is one rank's part."""
    cut: DeviceCut = UNCUT
    """The parts of the array that the devices of a replica hold; each has rows of its own."""

    def __repr__(self) -> str:
        kind = "Copies" if self.copies else "Shard"
        if hasattr(self.parts, "dtype"):
            return f"{kind} of {self.parts.dtype}{list(self.shape)}"
        held = "" if self.parts is None else f", {self.parts!r} in place of its parts"  # a function was mapped over it
        return f"{kind} of shape {list(self.shape)}{held}"

    def __jax_array__(self) -> Any:
        raise TypeError(f"a {self!r} is no array: replicas hold its parts. fddp.whole(state) gives whole arrays.")


jax.tree_util.register_dataclass(
    Shard, data_fields=["parts"], meta_fields=["shape", "copies", "ranks", "depth", "nodes", "cut"]
)


def is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def whole_forms(tree: Any) -> Any:
    """The same tree with the form of the whole array in place of each shard: as it lies on the devices of a replica."""

    def form(x: Shard) -> jax.ShapeDtypeStruct:
        lies = getattr(x.parts, "sharding", None)
        where = NamedSharding(lies.mesh, x.cut.spec) if x.cut.dims and isinstance(lies, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.parts.dtype, sharding=where)

    return jax.tree.map(lambda x: form(x) if is_shard(x) else x, tree, is_leaf=is_shard)


def copy_of(ranks: tuple[int, ...] | None, x: Shaped[Array, " *dims"]) -> Shard:
    """Makes a shard of copies from this replica's own array; inside a program."""
    return Shard(x.reshape(-1), x.shape, copies=True, ranks=ranks)


def stacked(shard: Shard, replicas: int) -> Shard:
    """A shard of one array that stacks the copies along a first dim, so that each replica holds a part of it."""
    copies = len(shard.nodes or range(replicas))
    return replace(shard, shape=(copies, *shard.shape), copies=False) if shard.copies else shard


def as_rows(
    x: Shaped[Array, " *dims"], replicas: int, depth: int = 1, cut: DeviceCut = UNCUT
) -> Shaped[Array, "replicas ... n"]:
    """Cuts an array into parts, one for each replica: the rows of the result.

    Args:
      x: the array.
      replicas: number of replicas.
      depth: number of rows that are cut each by itself: the layers along its first dim.
      cut: the parts that the devices of a replica hold; each cuts its own, whose layers are some of these rows.

    Returns:
      A part for each replica, with the dims of `part_dims`.
    """
    if cut.dims:
        inside = partial(_rows_of_device, replicas=replicas, depth=depth // cut.parts)
        return by_device(cut.axes, inside, cut.spec, PartitionSpec(None, *cut.rows))(x.reshape(cut.shape))
    dims = part_dims(x.size, replicas, depth)
    layers = x.reshape(depth, x.size // depth)
    filled = jnp.pad(layers, ((0, 0), (0, dims[-1] * replicas - x.size // depth)))
    if depth == 1:  # nothing is to be copied
        return filled.reshape(replicas, *dims)
    # Whole rows are copied: XLA's CPU backend transposes number by number.
    return jnp.stack(jnp.split(filled, replicas, axis=1)).reshape(replicas, *dims)


def of_rows(
    rows: Shaped[Array, "... n"], shape: tuple[int, ...], depth: int = 1, cut: DeviceCut = UNCUT
) -> Shaped[Array, " *dims"]:
    """Puts the parts of an array together, in the order of replicas: the inverse of `as_rows`."""
    if cut.dims:
        inside = partial(of_rows, shape=cut.of_device(shape), depth=depth // cut.parts)
        rows = rows.reshape(-1, depth, rows.shape[-1])
        return by_device(cut.axes, inside, PartitionSpec(None, *cut.rows), cut.spec)(rows).reshape(shape)
    width = rows.shape[-1]
    replicas = prod(rows.shape[:-1]) // depth
    layers = jnp.swapaxes(rows.reshape(replicas, depth, width), 0, 1).reshape(depth, replicas * width)
    return layers[:, : prod(shape) // depth].reshape(shape)


def own_part(
    x: Shaped[Array, " *dims"], replicas: int, index: Int32[Array, ""], depth: int = 1, cut: DeviceCut = UNCUT
) -> Shaped[Array, " *part"]:
    """The part of an array that replica `index` holds."""
    return jax.lax.dynamic_index_in_dim(as_rows(x, replicas, depth, cut), index, keepdims=False)


def there(size: int, replicas: int, index: Int32[Array, ""], depth: int = 1) -> Bool[Array, " *part"]:
    """Marks the elements of a replica's part that belong to the array; the others are padding."""
    dims = part_dims(size, replicas, depth)
    # Of each replica, on the host: a large array has more elements than 32 bits count.
    true = np.clip(size // depth - dims[-1] * np.arange(replicas), 0, dims[-1])
    return jnp.broadcast_to(jnp.arange(dims[-1]) < jnp.asarray(true, jnp.int32)[index], dims)


def true_numbers(plan: BucketPlan, of_parts: BucketPlan, replicas: int) -> Bool[np.ndarray, "replicas n"]:
    """Marks the numbers of leaves in the rows of a plan's only bucket; the others are padding."""
    pairs = zip(plan.travelling(plan.buckets[0]), of_parts.travelling(of_parts.buckets[0]))

    def rows(whole: Leaf, part: Leaf) -> Bool[np.ndarray, "replicas n"]:
        depth = prod(part.shape[:-1])
        places = np.arange(replicas)[:, None] * part.shape[-1] + np.arange(part.shape[-1])
        return np.tile(places < whole.size // depth, depth)

    return np.concatenate([rows(whole, part) for whole, part in pairs], axis=1)


def plan_of_parts(plan: BucketPlan) -> BucketPlan:
    """The plan of the same buckets, each with one replica's parts of its leaves."""
    leaves = tuple(replace(leaf, shape=part_of(leaf.shape, plan.parts)) for leaf in plan.leaves)
    of_parts = replace(plan, leaves=leaves, parts=1)
    buckets = [replace(bucket, size=sum(x.size for x in of_parts.travelling(bucket))) for bucket in plan.buckets]
    return replace(of_parts, buckets=tuple(buckets))


def pack_rows(of_parts: BucketPlan, replicas: int, tree: Any) -> tuple[Shaped[Array, " n"], ...]:
    """Lays whole leaves into buckets, the parts of each replica behind those of the replica before it.

    A bucket that is summed in rounds is laid so round by round.

    Args:
      of_parts: the plan from `plan_of_parts`.
      replicas: number of replicas.
      tree: arrays with the shapes of the whole plan's leaves, None for those that do not travel.

    Returns:
      One flat array for each bucket.
    """
    leaves = of_parts.treedef.flatten_up_to(tree)

    def packed(bucket: Bucket) -> Array:
        layers = [prod(part.shape[:-1]) // bucket.rounds for part in of_parts.travelling(bucket)]
        whole = [taken(leaves[i], bucket) for i in bucket.leaves]

        def one(*arrays: Array) -> Array:
            rows = [as_rows(x, replicas, depth) for x, depth in zip(arrays, layers)]
            return jax.vmap(partial(joined, dtype=bucket.dtype))(rows).reshape(-1)

        return one(*whole) if bucket.rounds == 1 else jax.vmap(one)(*whole).reshape(-1)

    return tuple(map(packed, of_parts.buckets))


def unpack_rows(of_parts: BucketPlan, plan: BucketPlan, replicas: int, buckets: Sequence[Shaped[Array, " n"]]) -> Any:
    """Takes whole leaves out of gathered buckets: the inverse of `pack_rows`, but for buckets in rounds.

    Args:
      of_parts: the plan from `plan_of_parts`.
      plan: the plan that it was made of.
      replicas: number of replicas.
      buckets: one flat array for each bucket: what `pack` makes of the parts of each replica, one behind the other.

    Returns:
      Whole leaves in the plan's tree, None for those that do not travel.
    """

    def whole(bucket: Bucket, flat: Array) -> list[Array]:
        parts = of_parts.travelling(bucket)
        each = flat.reshape(replicas, bucket.rounds, -1)
        rows = jax.lax.split(each, [part.size // bucket.rounds for part in parts], axis=2)
        forms = zip(rows, parts, plan.travelling(bucket))
        return [of_rows(x.reshape(replicas, *part.shape), leaf.shape, prod(part.shape[:-1])) for x, part, leaf in forms]

    return put_together(plan, map(whole, plan.buckets, buckets))


def _rows_of_device(x: Shaped[Array, " *dims"], replicas: int, depth: int) -> Shaped[Array, "replicas depth n"]:
    """Cuts one device's part of an array, with a row for each layer also where there is one."""
    rows = as_rows(x, replicas, depth)
    return rows.reshape(replicas, depth, rows.shape[-1])


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
