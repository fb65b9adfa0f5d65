"""Packs a tree into bucket arrays, and unpacks it again: the only place that knows how leaves lie in a bucket."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.buckets.plan import Bucket, BucketPlan
from fddp.wording import check_has


def pack(plan: BucketPlan, tree: Any) -> tuple[Shaped[Array, " n"], ...]:
    """Lays the leaves of a tree into the plan's buckets.

    Args:
      plan: a plan made for a tree of this structure.
      tree: arrays with the shapes and dtypes of the plan's leaves.

    Returns:
      One flat array per bucket, in launch order.

    Raises:
      ValueError: the tree has another structure, or a leaf another shape or dtype than planned.

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
        raise ValueError(f"the tree does not fit the plan, which is for {plan.treedef}: {error}") from None

    def pieces(bucket: Bucket) -> list[Array]:
        return [taken(_as_planned(plan, i, leaves[i]), bucket) for i in bucket.leaves]

    return tuple(joined(pieces(bucket), bucket.dtype, bucket.rounds) for bucket in plan.buckets)


def check_plan(call: str, plan: Any) -> None:
    """Refuses a value that is not a plan."""
    check_has("treedef", f"{call}: plan", plan, "a fddp.BucketPlan, from fddp.make_plan")


def unpack(plan: BucketPlan, buckets: Iterable[Shaped[Array, " n"]]) -> Any:
    """Takes the leaves out of the buckets again: the inverse of `pack`.

    Args:
      plan: the plan that `pack` followed.
      buckets: one flat array per bucket.

    Returns:
      The tree; leaves that do not travel under this plan are None.

    Raises:
      ValueError: the number or the length of the buckets is not the plan's.
    """
    check_plan("unpack", plan)
    check_has("__iter__", "unpack: buckets", buckets, "the arrays of pack")
    buckets = tuple(buckets)  # a generator can be read only once
    got = [jnp.shape(flat) for flat in buckets]
    planned = [(b.size,) for b in plan.buckets]
    if got != planned:
        raise ValueError(f"buckets of shapes {got} do not fit the plan, which has {planned}.")

    def pieces(bucket: Bucket, flat: Array) -> list[Array]:
        leaves = plan.travelling(bucket)
        parts = flat if bucket.rounds == 1 else flat.reshape(bucket.rounds, -1)
        split = jax.lax.split(parts, [leaf.size // bucket.rounds for leaf in leaves], axis=parts.ndim - 1)
        return [piece.reshape(leaf.shape) for leaf, piece in zip(leaves, split)]

    return put_together(plan, map(pieces, plan.buckets, buckets))


def taken(leaf: Array, bucket: Bucket) -> Array:
    """The elements of a leaf that travel in a bucket: all of them, or a slice."""
    return leaf if bucket.slice is None else jax.lax.slice_in_dim(leaf, *bucket.slice)


def put_together(plan: BucketPlan, pieces: Iterable[Sequence[Array]]) -> Any:
    """The tree of what came in the buckets, for each bucket its leaves or slices of them; None for what did not."""
    came: list[dict[int, Array]] = [{} for _ in plan.leaves]  # leaf → where a slice begins → the slice
    for bucket, some in zip(plan.buckets, pieces):
        for i, piece in zip(bucket.leaves, some):
            came[i][bucket.slice.begin if bucket.slice else 0] = piece
    return jax.tree.unflatten(plan.treedef, [_of_slices(each) for each in came])


def _of_slices(pieces: dict[int, Array]) -> Array | None:
    """Puts a leaf together of its slices; None, if it has none."""
    if len(pieces) < 2:
        return next(iter(pieces.values()), None)
    return jnp.concatenate([pieces[begin] for begin in sorted(pieces)])


def joined(pieces: list[Array], dtype: np.dtype, rounds: int = 1) -> Array:
    """Joins arrays to a flat one of so many equal parts, each of which holds an equal part of every array."""
    parts = (rounds, -1) if rounds > 1 else (-1,)
    flat = jnp.concatenate([piece.reshape(parts) for piece in pieces], axis=-1).reshape(-1)
    return flat.astype(jax.dtypes.canonicalize_dtype(dtype))


def _as_planned(plan: BucketPlan, i: int, value: Any) -> Array:
    leaf = plan.leaves[i]
    value = jnp.asarray(value)
    # JAX makes float32 of NumPy's float64, unless jax_enable_x64 is set.
    if value.shape != leaf.shape or value.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
        raise ValueError(f"leaf {leaf} does not fit the plan: got {value.dtype}{list(value.shape)}.")
    return value
