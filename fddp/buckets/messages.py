"""The messages of a step: its buckets, and a tail of loss, metrics, buffers and the weight.

The tail is ready when the forward pass ends. A gradient is divided by the summed weight, and can be
used as soon as its own bucket and the tail have arrived. So a step sends the tail early. Behind the
last bucket it would delay all updates, and XLA would have no updates of earlier buckets to run
under the last sums.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from fddp.buckets.packing import concatenated
from fddp.buckets.plan import Bucket, BucketPlan, Message


@dataclass(frozen=True)
class Messages:
    """The flat arrays of a plan's messages, and the layout of the tail at the end of one."""

    arrays: tuple[Shaped[Array, " n"], ...]
    """One array per message, in the plan's order."""
    tail: tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
    """Shapes and structure of the tail; static."""


jax.tree_util.register_dataclass(Messages, data_fields=["arrays"], meta_fields=["tail"])


def add_tail(plan: BucketPlan, buckets: Sequence[Array], tail: PyTree) -> Messages:
    """Builds the plan's messages from flat buckets and a tail of any numeric dtypes."""
    leaves, treedef = jax.tree.flatten(tail)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    dtype = scalar_dtype(shapes)
    words = [_to_floats(x, dtype) for x in leaves]
    payloads = {None: jnp.zeros(0, dtype), **dict(enumerate(buckets))}
    arrays = [payloads[message.bucket] for message in plan.messages]
    carrier = plan.messages.index(plan.carrier)
    if jnp.finfo(arrays[carrier].dtype).bits < jnp.finfo(dtype).bits:
        raise ValueError(
            f"{plan.carrier.name}, of {arrays[carrier].dtype}, cannot carry scalars of {dtype}."
        )
    arrays[carrier] = concatenated([arrays[carrier], *words], arrays[carrier].dtype)
    return Messages(tuple(arrays), (shapes, treedef))


def take_tail(plan: BucketPlan, messages: Messages) -> tuple[tuple[Array, ...], Any]:
    """Splits summed messages into buckets and tail: the inverse of `add_tail`."""
    shapes, treedef = messages.tail
    sizes = [math.prod(x.shape) * _words(x.dtype) for x in shapes]
    carrier = plan.messages.index(plan.carrier)
    arrays = list(messages.arrays)
    arrays[carrier], words = jax.lax.split(
        arrays[carrier], [arrays[carrier].size - sum(sizes), sum(sizes)]
    )
    received = {message.bucket: array for message, array in zip(plan.messages, arrays)}
    buckets = [received[k] for k in range(len(plan.buckets))]
    pieces = jax.lax.split(jnp.real(words), sizes)
    tail = jax.tree.unflatten(treedef, [_from_floats(piece, x) for piece, x in zip(pieces, shapes)])
    return tuple(buckets), tail


def scalar_dtype(shapes: Iterable[jax.ShapeDtypeStruct | Array]) -> np.dtype:
    """Returns the real dtype that holds all scalars of a tail."""
    # Narrower floats fit into float32. JAX has no implicit promotion for floats of 8 bits or less.
    inexact = [x.dtype for x in shapes if jnp.issubdtype(x.dtype, jnp.inexact)]
    floats = [jnp.finfo(dtype).dtype for dtype in inexact if dtype.itemsize >= 4]
    return np.dtype(jnp.result_type(np.float32, *floats))


# Some elements take several floats: an integer one per 16-bit word, as one float would round it, a
# complex number its real and imaginary parts.


def _words(dtype: np.dtype) -> int:
    """Number of floats per element."""
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


### The carrier of the tail


def place_scalars(
    plan: BucketPlan, dtype: DTypeLike = np.float32, *, early: bool = False, exact: bool = True
) -> BucketPlan:
    """Appends the scalars (loss, metrics, buffers) to the last bucket that holds `dtype` exactly.

    With `early` it is the first such bucket, as every update needs the summed weight. Without one,
    or if a hook rounds buckets or unused ones are skipped (`exact=False`), they get an all-reduce.
    """
    bits = jnp.finfo(dtype).bits
    messages = list(map(Message, range(len(plan.buckets))))
    carriers = [k for k, bucket in enumerate(plan.buckets) if exact and _holds(bucket, bits)]
    if carriers:
        number = carriers[0] if early else carriers[-1]
        messages[number] = messages[number]._replace(scalars=True)
    else:
        messages.insert(0 if early else len(messages), Message(None, scalars=True))
    return replace(plan, messages=tuple(messages))


def _holds(bucket: Bucket, bits: int) -> bool:
    """True if floats of `bits` bits can be appended to a bucket."""
    floats = jnp.issubdtype(bucket.dtype, jnp.inexact) and jnp.finfo(bucket.dtype).bits >= bits
    return floats and bucket.rows is None and bucket.rounds == 1
