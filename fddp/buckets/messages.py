"""The tail of a step: small numbers that travel beside the gradients, such as the loss, metrics and buffers.

A tail is a small vector of exact floats behind a bucket. All are known when the forward pass ends. The weight is among
them, and with it a gradient can be divided and used as soon as its own bucket is back: so a step sends the tail early.
Behind the last bucket it would hold up every update until that is back, and nothing would be left to hide the last
sums under: XLA puts the updates of earlier buckets there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from fddp.buckets.packing import joined
from fddp.buckets.plan import BucketPlan
from fddp.buckets.table_rows import add_table_rows, take_table_rows


@dataclass(frozen=True)
class Messages:
    """Flat arrays, one for each message of the plan, and the layout of the tail at the end of one of them."""

    arrays: tuple[Shaped[Array, " n"], ...]
    """The arrays, in the order of the plan's messages."""
    tail: tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
    """Shapes and structure of the tail; static."""


jax.tree_util.register_dataclass(Messages, data_fields=["arrays"], meta_fields=["tail"])


def add_tail(plan: BucketPlan, buckets: Sequence[Array], tail: Any) -> Messages:
    """Puts a tree of small numbers behind the bucket that carries them exactly, or into a message of their own.

    Args:
      plan: the plan of the buckets.
      buckets: one flat array per bucket.
      tail: a tree of arrays of any numeric dtype.

    Returns:
      A flat array for each message of the plan, and the layout of the tail.
    """
    leaves, treedef = jax.tree.flatten(tail)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    dtype = scalar_dtype(shapes)
    words = [_to_floats(x, dtype) for x in leaves]
    sent: dict[tuple[int | None, bool], Array] = {(None, False): jnp.zeros(0, dtype)}
    for k, (bucket, flat) in enumerate(zip(plan.buckets, buckets)):
        if bucket.rows:
            sent[k, True], flat = take_table_rows(bucket, flat)
        sent[k, False] = flat
    arrays = [sent[message.bucket, message.rows] for message in plan.messages]
    at = plan.messages.index(plan.carrier)
    if jnp.finfo(arrays[at].dtype).bits < jnp.finfo(dtype).bits:
        raise ValueError(f"{plan.carrier.name}, of {arrays[at].dtype}, cannot carry scalars of {dtype}.")
    arrays[at] = joined([arrays[at], *words], arrays[at].dtype)
    return Messages(tuple(arrays), (shapes, treedef))


def take_tail(plan: BucketPlan, messages: Messages) -> tuple[tuple[Array, ...], Any]:
    """Splits messages into buckets and tail: the inverse of `add_tail`.

    Args:
      plan: the plan of the buckets.
      messages: the messages of `add_tail`, summed over replicas.

    Returns:
      The buckets and the tail.
    """
    shapes, treedef = messages.tail
    sizes = [math.prod(x.shape) * _words(x.dtype) for x in shapes]
    at = plan.messages.index(plan.carrier)
    arrays = list(messages.arrays)
    arrays[at], words = jax.lax.split(arrays[at], [arrays[at].size - sum(sizes), sum(sizes)])
    came = {(message.bucket, message.rows): array for message, array in zip(plan.messages, arrays)}
    buckets = [
        add_table_rows(bucket, came[k, True], came[k, False]) if bucket.rows else came[k, False]
        for k, bucket in enumerate(plan.buckets)
    ]
    pieces = jax.lax.split(jnp.real(words), sizes)
    tail = jax.tree.unflatten(treedef, [_from_floats(piece, x) for piece, x in zip(pieces, shapes)])
    return tuple(buckets), tail


def scalar_dtype(shapes: Iterable[Any]) -> np.dtype:
    """The real dtype that holds every number of a tail, given arrays or their shapes."""
    # Narrower floats fit into float32. JAX has no implicit promotion for floats of 8 bits or less.
    inexact = [x.dtype for x in shapes if jnp.issubdtype(x.dtype, jnp.inexact)]
    floats = [jnp.finfo(dtype).dtype for dtype in inexact if dtype.itemsize >= 4]
    return np.dtype(jnp.result_type(np.float32, *floats))


# A number that one float does not hold exactly travels as several: an integer as its 16-bit words, a complex number as
# its real and imaginary part.


def _words(dtype: np.dtype) -> int:
    """Number of floats that one element takes."""
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
