"""Cuts leaves and buckets into equal shards, one per replica, for reduce-scatter and all-gather.

A leaf is flattened, padded with zeros and cut into one shard per replica. A stack is cut layer by
layer, so that a shard of some of its layers can be sent separately. A bucket holds the shards of
its leaves for the first replica, then those for the second, and so on. So a reduce-scatter gives
each replica the bucket of its shards, on which elementwise programs can work, and an all-gather
restores the leaves.

Source: ZeRO (Rajbhandari et al., SC 2020); the flat parameters of PyTorch's
FullyShardedDataParallel.
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
from jaxtyping import Array, Bool, Int32, PyTree, Shaped

from fddp.buckets.by_device import UNCUT, DeviceCut, by_device
from fddp.buckets.packing import concatenated, elements_in, put_together
from fddp.buckets.part_forms import part_dims, part_of
from fddp.buckets.plan import Bucket, BucketPlan, Leaf


@dataclass(frozen=True)
class Shard:
    """An array in equal shards, or in full copies, one per replica. `fddp.whole` joins them.

    Example:
      >>> import jax.numpy as jnp
      >>> Shard(jnp.arange(6.0), (5,))
      Shard of float32[5]
    """

    parts: Any
    """The shards of all replicas in order (under MPI the shard of this rank), flat or with a row
    per layer, padded at the ends. None: removed by `take_apart`."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    copies: bool = False
    """True if each shard is a full copy; the copies may differ between replicas."""
    ranks: tuple[int, ...] | None = None
    """Global numbers of the processes that hold the shards. None: those of the array's mesh."""
    depth: int = 1
    """Number of rows (layers of a stack) that are cut separately. 1: the array is cut flat."""
    nodes: tuple[tuple[int, ...], ...] | None = None
    """The replicas of each node, if the shards of each node make up the array. None: the shards of
    all replicas do, or this is the shard of one rank."""
    cut: DeviceCut = UNCUT
    """The tensor-parallel parts of the array. Each is sharded separately, with its own rows."""

    def __repr__(self) -> str:
        kind = "Copies" if self.copies else "Shard"
        if hasattr(self.parts, "dtype"):
            return f"{kind} of {self.parts.dtype}{list(self.shape)}"
        # Any other value is the result of a function that was mapped over the array.
        value = "" if self.parts is None else f", {self.parts!r} in place of its parts"
        return f"{kind} of shape {list(self.shape)}{value}"

    def __jax_array__(self) -> Any:
        raise TypeError(
            f"a {self!r} is not an array: replicas hold its parts. fddp.whole(state) returns "
            "whole arrays."
        )


jax.tree_util.register_dataclass(
    Shard, data_fields=["parts"], meta_fields=["shape", "copies", "ranks", "depth", "nodes", "cut"]
)


def is_shard(x: object) -> bool:
    return isinstance(x, Shard)


def whole_forms(tree: PyTree) -> Any:
    """Replaces each shard in a tree by the shape, dtype and device sharding of its whole array."""

    def form(x: Shard) -> jax.ShapeDtypeStruct:
        sharding = getattr(x.parts, "sharding", None)
        device_sharding = (
            NamedSharding(sharding.mesh, x.cut.spec)
            if x.cut.dims and isinstance(sharding, NamedSharding)
            else None
        )
        return jax.ShapeDtypeStruct(x.shape, x.parts.dtype, sharding=device_sharding)

    return jax.tree.map(lambda x: form(x) if is_shard(x) else x, tree, is_leaf=is_shard)


def copy_of(ranks: tuple[int, ...] | None, x: Shaped[Array, " *dims"]) -> Shard:
    """Makes a shard of copies from this replica's array, inside a program."""
    return Shard(x.reshape(-1), x.shape, copies=True, ranks=ranks)


def stacked(shard: Shard, replicas: int) -> Shard:
    """Turns a shard of copies into a shard of their stack; returns other shards unchanged."""
    copies = len(shard.nodes or range(replicas))
    return replace(shard, shape=(copies, *shard.shape), copies=False) if shard.copies else shard


def split_into_shards(
    x: Shaped[Array, " *dims"], replicas: int, depth: int = 1, cut: DeviceCut = UNCUT
) -> Shaped[Array, "replicas ... n"]:
    """Cuts an array into shards of shape `part_dims`, one per replica along a new first dim.

    Each of `depth` layers is cut separately. A tensor-parallel array is cut on each device, whose
    layers are an equal part of `depth`.
    """
    if cut.dims:
        cut_part = partial(_rows_of_device, replicas=replicas, depth=depth // cut.parts)
        return by_device(cut.axes, cut_part, cut.spec, PartitionSpec(None, *cut.rows))(
            x.reshape(cut.shape)
        )
    dims = part_dims(x.size, replicas, depth)
    layers = x.reshape(depth, x.size // depth)
    padded = jnp.pad(layers, ((0, 0), (0, dims[-1] * replicas - x.size // depth)))
    if depth == 1:  # needs no copy
        return padded.reshape(replicas, *dims)
    # Whole rows are copied: XLA's CPU backend transposes element by element.
    return jnp.stack(jnp.split(padded, replicas, axis=1)).reshape(replicas, *dims)


def of_rows(
    rows: Shaped[Array, "... n"], shape: tuple[int, ...], depth: int = 1, cut: DeviceCut = UNCUT
) -> Shaped[Array, " *dims"]:
    """Joins the shards of all replicas to an array: the inverse of `as_rows`."""
    if cut.dims:
        join_part = partial(of_rows, shape=cut.of_device(shape), depth=depth // cut.parts)
        rows = rows.reshape(-1, depth, rows.shape[-1])
        return by_device(cut.axes, join_part, PartitionSpec(None, *cut.rows), cut.spec)(
            rows
        ).reshape(shape)
    width = rows.shape[-1]
    replicas = prod(rows.shape[:-1]) // depth
    layers = jnp.swapaxes(rows.reshape(replicas, depth, width), 0, 1).reshape(
        depth, replicas * width
    )
    return layers[:, : prod(shape) // depth].reshape(shape)


def own_part(
    x: Shaped[Array, " *dims"],
    replicas: int,
    index: Int32[Array, ""],
    depth: int = 1,
    cut: DeviceCut = UNCUT,
) -> Shaped[Array, " *part"]:
    """Returns the shard of replica `index`."""
    return jax.lax.dynamic_index_in_dim(
        split_into_shards(x, replicas, depth, cut), index, keepdims=False
    )


def there(
    size: int, replicas: int, index: Int32[Array, ""], depth: int = 1
) -> Bool[Array, " *part"]:
    """Returns the mask of elements of a replica's shard that are not padding."""
    dims = part_dims(size, replicas, depth)
    # On the host, for each replica: a large array has more elements than 32 bits count.
    lengths = np.clip(size // depth - dims[-1] * np.arange(replicas), 0, dims[-1])
    return jnp.broadcast_to(jnp.arange(dims[-1]) < jnp.asarray(lengths, jnp.int32)[index], dims)


def true_numbers(
    plan: BucketPlan, part_plan: BucketPlan, replicas: int
) -> Bool[np.ndarray, "replicas n"]:
    """Returns the mask of elements in the rows of the plan's only bucket that are not padding."""
    pairs = zip(plan.travelling(plan.buckets[0]), part_plan.travelling(part_plan.buckets[0]))

    def mask(leaf: Leaf, part: Leaf) -> Bool[np.ndarray, "replicas n"]:
        depth = prod(part.shape[:-1])
        positions = np.arange(replicas)[:, None] * part.shape[-1] + np.arange(part.shape[-1])
        return np.tile(positions < leaf.size // depth, depth)

    return np.concatenate([mask(leaf, part) for leaf, part in pairs], axis=1)


def plan_of_parts(plan: BucketPlan) -> BucketPlan:
    """Returns the same plan for the shards of one replica."""
    leaves = tuple(replace(leaf, shape=part_of(leaf.shape, plan.parts)) for leaf in plan.leaves)
    part_plan = replace(plan, leaves=leaves, parts=1)
    buckets = [
        replace(bucket, size=sum(x.size for x in part_plan.travelling(bucket)))
        for bucket in plan.buckets
    ]
    return replace(part_plan, buckets=tuple(buckets))


def pack_rows(
    part_plan: BucketPlan, replicas: int, tree: PyTree
) -> tuple[Shaped[Array, " n"], ...]:
    """Packs whole leaves into flat buckets that concatenate the packed shards of all replicas.

    A bucket in rounds concatenates its rounds, each packed in this way. `part_plan` is the result
    of `plan_of_parts`.
    """
    leaves = part_plan.treedef.flatten_up_to(tree)

    def packed(bucket: Bucket) -> Array:
        depths = [prod(part.shape[:-1]) // bucket.rounds for part in part_plan.travelling(bucket)]
        arrays = [elements_in(leaves[i], bucket) for i in bucket.leaves]

        def pack_round(*arrays: Array) -> Array:
            rows = [split_into_shards(x, replicas, depth) for x, depth in zip(arrays, depths)]
            return jax.vmap(partial(concatenated, dtype=bucket.dtype))(rows).reshape(-1)

        return (
            pack_round(*arrays) if bucket.rounds == 1 else jax.vmap(pack_round)(*arrays).reshape(-1)
        )

    return tuple(map(packed, part_plan.buckets))


def unpack_rows(
    part_plan: BucketPlan, plan: BucketPlan, replicas: int, buckets: Sequence[Shaped[Array, " n"]]
) -> Any:
    """Unpacks whole leaves: the inverse of `pack_rows`, except for buckets in rounds.

    Of a bucket in rounds `pack_rows` concatenates the rounds; here the packed shards of the
    replicas are concatenated, as an all-gather returns them.
    """

    def whole_leaves(bucket: Bucket, flat: Array) -> list[Array]:
        part_leaves = part_plan.travelling(bucket)
        rounds = flat.reshape(replicas, bucket.rounds, -1)
        rows = jax.lax.split(rounds, [part.size // bucket.rounds for part in part_leaves], axis=2)
        forms = zip(rows, part_leaves, plan.travelling(bucket))
        return [
            of_rows(x.reshape(replicas, *part.shape), leaf.shape, prod(part.shape[:-1]))
            for x, part, leaf in forms
        ]

    return put_together(plan, map(whole_leaves, plan.buckets, buckets))


def _rows_of_device(
    x: Shaped[Array, " *dims"], replicas: int, depth: int
) -> Shaped[Array, "replicas depth n"]:
    """Cuts the part of one device, with a dim for layers even if there is only one."""
    rows = split_into_shards(x, replicas, depth)
    return rows.reshape(replicas, depth, rows.shape[-1])


def take_apart(tree: PyTree) -> tuple[Any, list[Shaped[Array, " n"]]]:
    """Replaces the arrays of a tree's shards by None, and returns tree and arrays."""
    arrays = [x.parts for x in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(x)]
    return jax.tree.map(
        lambda x: replace(x, parts=None) if is_shard(x) else x, tree, is_leaf=is_shard
    ), arrays


def insert_shards(tree: PyTree, arrays: Sequence[Shaped[Array, " n"]]) -> Any:
    """Inserts the arrays of shards into a tree: the inverse of `take_apart`."""
    iterator = iter(arrays)
    return jax.tree.map(
        lambda x: replace(x, parts=next(iterator)) if is_shard(x) else x, tree, is_leaf=is_shard
    )
