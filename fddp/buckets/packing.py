"""Packs a tree into bucket arrays and unpacks it; `shard_packing` packs a state in shards."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree, Shaped

from fddp.buckets.plan import Bucket, BucketPlan
from fddp.wording import check_has

# (array, sizes of the pieces along its last dim) → the pieces
Split: TypeAlias = Callable[[Array, Sequence[int]], Sequence[Array]]
# The number of kernels that a program must save to have its offsets as arguments.
SHARED = 16


def pack(plan: BucketPlan, tree: PyTree) -> tuple[Shaped[Array, " n"], ...]:
    """Packs the leaves of a tree into the plan's buckets.

    Args:
      plan: a plan made for a tree of this structure.
      tree: arrays with the shapes and dtypes of the plan's leaves.

    Returns:
      One flat array per bucket, in launch order.

    Raises:
      ValueError: the structure of the tree, or the shape or dtype of a leaf, differs from the plan.

    Example:
      >>> import jax.numpy as jnp
      >>> from fddp import make_plan
      >>> tree = {"a": jnp.arange(2.0), "b": jnp.full((1, 2), 7.0)}
      >>> plan = make_plan(tree)
      >>> pack(plan, tree)[0].tolist()
      [7.0, 7.0, 0.0, 1.0]
    """
    check_plan("pack", plan)
    try:
        leaves = plan.treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"the tree does not fit the plan, which is for {plan.treedef}: {error}"
        ) from None

    def pieces(bucket: Bucket) -> list[Array]:
        return [_as_planned(plan, i, leaves[i]) for i in bucket.leaves]

    return tuple(
        concatenated(pieces(bucket), bucket.dtype, bucket.rounds) for bucket in plan.buckets
    )


def check_plan(call: str, plan: object) -> None:
    """Raises TypeError for a value that is not a plan."""
    check_has("treedef", f"{call}: plan", plan, "a fddp.BucketPlan, from fddp.make_plan")


def unpack(plan: BucketPlan, buckets: Iterable[Shaped[Array, " n"]]) -> Any:
    """Unpacks the leaves of a tree from its buckets: the inverse of `pack`.

    Args:
      plan: the plan of `pack`.
      buckets: one flat array per bucket.

    Returns:
      The tree, with None for leaves that are in no bucket.

    Raises:
      ValueError: the number or the shapes of the buckets differ from the plan.
    """
    return _unpack(plan, buckets, _split)


def unpack_received(plan: BucketPlan, buckets: Iterable[Shaped[Array, " n"]]) -> Any:
    """Unpacks buckets that are results of messages, and compiles faster than `unpack` on CPUs."""
    return _unpack(plan, buckets, _split_at_offsets)


def _unpack(plan: BucketPlan, buckets: Iterable[Array], split: Split) -> Any:
    check_plan("unpack", plan)
    check_has("__iter__", "unpack: buckets", buckets, "the arrays of pack")
    buckets = tuple(buckets)  # a generator can be read only once
    shapes = [jnp.shape(flat) for flat in buckets]
    planned = [(b.size,) for b in plan.buckets]
    if shapes != planned:
        raise ValueError(f"buckets of shapes {shapes} do not fit the plan, which has {planned}.")

    def pieces(bucket: Bucket, flat: Array) -> list[Array]:
        leaves = plan.leaves_of(bucket)
        sizes = [leaf.size // bucket.rounds for leaf in leaves]
        if bucket.rounds > 1:
            flat = flat.reshape(bucket.rounds, -1)
        return [piece.reshape(leaf.shape) for leaf, piece in zip(leaves, split(flat, sizes))]

    return put_together(plan, map(pieces, plan.buckets, buckets))


def _split(rows: Array, sizes: Sequence[int]) -> Sequence[Array]:
    return jax.lax.split(rows, sizes, axis=rows.ndim - 1)


def _split_at_offsets(rows: Array, sizes: Sequence[int]) -> Sequence[Array]:
    """Splits an array so that XLA:CPU compiles one kernel for all readers of equal pieces.

    It compiles equal kernels once, but each constant offset makes a kernel of its own, which takes
    20 ms. Behind a barrier an offset is an argument.
    """
    if len(sizes) - len(set(sizes)) < SHARED or rows.shape[-1] > np.iinfo(np.int32).max:
        return _split(rows, sizes)

    def at_offsets(rows: Array) -> list[Array]:
        begins = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
        offsets = jax.lax.optimization_barrier(list(map(jnp.asarray, begins)))
        piece = partial(jax.lax.dynamic_slice_in_dim, rows, axis=rows.ndim - 1)
        return list(map(piece, offsets, sizes))

    return jax.lax.platform_dependent(rows, cpu=at_offsets, default=partial(_split, sizes=sizes))


def put_together(plan: BucketPlan, pieces: Iterable[Sequence[Array]]) -> Any:
    """Builds the tree from the arrays of each bucket, with None for leaves outside all buckets."""
    leaves = list[Array | None]([None] * len(plan.leaves))
    for bucket, arrays in zip(plan.buckets, pieces):
        for i, piece in zip(bucket.leaves, arrays):
            leaves[i] = piece
    return jax.tree.unflatten(plan.treedef, leaves)


def concatenated(pieces: list[Array], dtype: np.dtype, rounds: int = 1) -> Array:
    """Concatenates arrays flat, or as `rounds` parts, each with an equal part of every array."""
    shape = (rounds, -1) if rounds > 1 else (-1,)
    flat = jnp.concatenate([piece.reshape(shape) for piece in pieces], axis=-1).reshape(-1)
    return flat.astype(jax.dtypes.canonicalize_dtype(dtype))


def _as_planned(plan: BucketPlan, i: int, value: ArrayLike) -> Array:
    leaf = plan.leaves[i]
    value = jnp.asarray(value)
    # JAX converts NumPy's float64 to float32, unless jax_enable_x64 is set.
    if value.shape != leaf.shape or value.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
        raise ValueError(
            f"leaf {leaf} does not fit the plan: got {value.dtype}{list(value.shape)}."
        )
    return value
