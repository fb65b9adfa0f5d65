"""A tree as bucket arrays, and back: the only place that knows how leaves lie in a bucket.

Beside the leaves, a few more numbers travel with a step: the loss, metrics, buffers. They are its *tail*, a small
vector of exact floats behind a bucket. All are known when the forward pass ends, and with the weight among them a
gradient can be divided and used as soon as its own bucket is back: a staged step sends them early. In one program they
come last, as XLA's GPU scheduler finds less to lay over a first bucket that waits for the loss too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from fddp.plan import BucketPlan


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
    try:
        leaves = plan.treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"the tree does not fit the plan, which is for {plan.treedef}: {error}") from None
    return tuple(
        _joined([_as_planned(plan, i, leaves[i]) for i in bucket.leaves], bucket.dtype) for bucket in plan.buckets
    )


def unpack(plan: BucketPlan, buckets: Sequence[Shaped[Array, " n"]]) -> Any:
    """Takes the leaves out of the buckets again: the inverse of `pack`.

    Args:
      plan: the plan that `pack` followed.
      buckets: one flat array per bucket.

    Returns:
      The tree; leaves that do not travel under this plan are None.

    Raises:
      ValueError: the number or the length of the buckets is not the plan's.
    """
    got, planned = [b.shape for b in buckets], [(b.size,) for b in plan.buckets]
    if got != planned:
        raise ValueError(f"buckets of shapes {got} do not fit the plan, which has {planned}.")
    leaves: list[Any] = [None] * len(plan.leaves)
    for bucket, flat in zip(plan.buckets, buckets):
        pieces = jax.lax.split(flat, [plan.leaves[i].size for i in bucket.leaves])
        for i, piece in zip(bucket.leaves, pieces):
            leaves[i] = piece.reshape(plan.leaves[i].shape)
    return jax.tree.unflatten(plan.treedef, leaves)


@dataclass(frozen=True)
class Wires:
    """What is sent: one flat array per all-reduce, and how the tail lies at the end of one of them."""

    arrays: tuple[Shaped[Array, " n"], ...]
    tail: tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
    """Shapes and structure of the tail; static."""


jax.tree_util.register_dataclass(Wires, data_fields=["arrays"], meta_fields=["tail"])


def add_tail(plan: BucketPlan, buckets: Sequence[Array], tail: Any) -> Wires:
    """Puts a tree of small numbers behind the bucket that carries them exactly, or on a wire of their own.

    Args:
      plan: the plan of the buckets.
      buckets: one flat array per bucket.
      tail: a tree of arrays of any numeric dtype.

    Returns:
      What is sent: as many flat arrays as there are buckets, one more if the tail travels alone.
    """
    leaves, treedef = jax.tree.flatten(tail)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    dtype = _tail_dtype(shapes)
    words = [_to_floats(x, dtype) for x in leaves]
    (at, alone), arrays = plan.tail_wire(dtype), list(buckets)
    if alone:
        arrays.insert(at, jnp.zeros(0, dtype))
    arrays[at] = _joined([arrays[at], *words], arrays[at].dtype)
    return Wires(tuple(arrays), (shapes, treedef))


def take_tail(plan: BucketPlan, wires: Wires) -> tuple[tuple[Array, ...], Any]:
    """Splits what was sent into buckets and tail: the inverse of `add_tail`.

    Args:
      plan: the plan of the buckets.
      wires: what `add_tail` returned, summed over replicas.

    Returns:
      The buckets and the tail.
    """
    shapes, treedef = wires.tail
    sizes = [math.prod(x.shape) * _words(x.dtype) for x in shapes]
    (at, alone), arrays = plan.tail_wire(_tail_dtype(shapes)), list(wires.arrays)
    arrays[at], words = jax.lax.split(arrays[at], [arrays[at].size - sum(sizes), sum(sizes)])
    if alone:
        del arrays[at]
    pieces = jax.lax.split(jnp.real(words), sizes)
    tail = jax.tree.unflatten(treedef, [_from_floats(piece, x) for piece, x in zip(pieces, shapes)])
    return tuple(arrays), tail


def to_words(x: Array) -> Array:
    """The bits of an array as integers, whose sum is a broadcast where only one replica contributes.

    A sum of floats is none: it loses the sign of a zero, what a NaN carries and, on CPUs, the smallest numbers.

    Args:
      x: of any dtype, also random keys.

    Returns:
      Integers or booleans.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.int8) if sub_byte(x.dtype) else x  # XLA has no bytes of less than 8 bits to send
    if sub_byte(x.dtype):
        x = x.astype(jnp.float16)  # holds them exactly
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def from_words(words: Array, like: Array) -> Array:
    """The inverse of `to_words`, for an array like another."""
    dtype = like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if not jnp.issubdtype(dtype, jnp.inexact) or sub_byte(dtype):
        floats = jnp.issubdtype(dtype, jnp.inexact)
        return (jax.lax.bitcast_convert_type(words, jnp.float16) if floats else words).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real, imag = jax.lax.bitcast_convert_type(words, jnp.finfo(dtype).dtype)
        return jax.lax.complex(real, imag)
    return jax.lax.bitcast_convert_type(words, dtype)


def sub_byte(dtype: Any) -> bool:
    """Whether a number has less than 8 bits."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _joined(pieces: list[Array], dtype: np.dtype) -> Array:
    return jnp.concatenate([piece.reshape(-1) for piece in pieces]).astype(jax.dtypes.canonicalize_dtype(dtype))


def _as_planned(plan: BucketPlan, i: int, value: Any) -> Array:
    leaf, value = plan.leaves[i], jnp.asarray(value)
    # NumPy's float64 is JAX's float32, unless that was told to go on in 64 bits.
    if value.shape != leaf.shape or value.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
        raise ValueError(f"leaf {leaf} does not fit the plan: got {value.dtype}{list(value.shape)}.")
    return value


def _tail_dtype(shapes: Sequence[jax.ShapeDtypeStruct]) -> np.dtype:
    """The real dtype that holds every number of a tail."""
    floats = [jnp.finfo(x.dtype).dtype for x in shapes if jnp.issubdtype(x.dtype, jnp.inexact)]
    return np.dtype(jnp.result_type(np.float32, *floats))


# What does not fit one float exactly travels as several: an integer as its 16-bit words, a complex number as its parts.


def _words(dtype: np.dtype) -> int:
    """How many floats one element takes."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 2
    return max(1, dtype.itemsize // 2) if jnp.issubdtype(dtype, jnp.integer) else 1


def _to_floats(x: Array, dtype: np.dtype) -> Float[Array, " n"]:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    elif _words(x.dtype) > 1:
        x = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x.reshape(-1).astype(dtype)


def _from_floats(words: Float[Array, " n"], like: jax.ShapeDtypeStruct) -> Array:
    if _words(like.dtype) == 1:
        return words.astype(like.dtype).reshape(like.shape)
    words = words.reshape(*like.shape, _words(like.dtype))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return jax.lax.complex(words[..., 0], words[..., 1]).astype(like.dtype)
    return jax.lax.bitcast_convert_type(words.astype(jnp.uint16), like.dtype)
