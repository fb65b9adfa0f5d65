"""Hooks that send less of a bucket: 8 bits a number, or only the largest numbers; they remember the rest."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, split
from fddp.hooks.narrow import as_rows, is_float
from fddp.wording import check_whole

BYTES_OF_A_SCALE = 4


def quantize(*, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends 8-bit integers, each block of numbers with a scale of its own (PyTorch's `quantization_pertensor_hook`).

    Args:
      block: count of numbers that share a scale.
      error_feedback: whether the rounding error is added to the next step's gradients.

    Returns:
      The hook: an all-to-all of 8-bit parts, sums in float32, an all-gather of 8-bit sums. It sends about a quarter of
      the bytes.

    Raises:
      ValueError: block is no whole number of 1 or more.
    """
    check_whole("quantize: block", block, 1)

    def reduce(comm: Communicator, x: Float[Array, " n"]) -> tuple[Array, Array]:
        message = _to_int8(as_rows(x, comm.size, block), block)
        arrived = _from_int8(comm.all_to_all(message), block).sum(0)
        answer = _to_int8(arrived, block)
        total = _from_int8(comm.all_gather(answer), block)
        # The sum is rounded too: the replica that rounds it remembers that error.
        stood = _from_int8(message, block).at[comm.replica_index()].add(_from_int8(answer, block) - arrived)
        return total.reshape(-1)[: x.size], stood.reshape(-1)[: x.size]

    return _compressed(reduce, error_feedback, f"quantize(block={block}, error_feedback={error_feedback})")


def topk(ratio: float = 0.01, *, error_feedback: bool = True) -> Hook:
    """Sends only each replica's largest numbers and their places (Aji and Heafield 2017; Stich et al. 2018).

    Args:
      ratio: share of a bucket's numbers that is sent, above 0 and up to 1.
      error_feedback: whether numbers that were not sent are added to the next step's gradients.

    Returns:
      The hook. Every replica gets all replicas' numbers, as they are: 8 (p − 1) bytes for each, 12 (p − 1) in float64,
      so ratio × p should be small.

    Raises:
      ValueError: ratio is out of its range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"topk: ratio must be above 0 and at most 1, got {ratio!r}.")

    def reduce(comm: Communicator, x: Float[Array, " n"]) -> tuple[Array, Array]:
        # Numbers that are not finite, NaN too, are sent before all others, or the other replicas would not see them.
        _, where = jax.lax.top_k(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), math.ceil(ratio * x.size))
        largest = x[where].astype(jnp.promote_types(x.dtype, jnp.float32))
        words = jax.lax.bitcast_convert_type(largest, jnp.int32)  # two words for a number of 64 bits
        gathered = comm.all_gather(jnp.concatenate([where.astype(jnp.int32), words.reshape(-1)]))
        places, everybodys = jnp.split(gathered, [where.size], axis=1)
        values = jax.lax.bitcast_convert_type(everybodys.reshape(-1, *words.shape[1:]), largest.dtype)
        total = jnp.zeros_like(x).at[places.reshape(-1)].add(values.astype(x.dtype))
        return total, jnp.zeros_like(x).at[where].set(x[where])

    return _compressed(reduce, error_feedback, f"topk({ratio}, error_feedback={error_feedback})")


def _compressed(reduce: Callable[[Communicator, Array], tuple[Array, Array]], error_feedback: bool, name: str) -> Hook:
    """Makes a hook that sends approximations and, with error feedback, remembers their errors.

    Args:
      reduce: (comm, x) → (sum over replicas, this replica's approximation of x in it).
      error_feedback: whether x is the bucket plus the last error.
      name: the hook's name.

    Returns:
      The hook; it sums integers and complex numbers as they are.
    """

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if error_feedback and is_float(leaf.dtype) else ()

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        buffer = bucket.buffer
        if not is_float(buffer.dtype):
            return comm.all_reduce(buffer), state
        if not error_feedback:
            return reduce(comm, buffer)[0].astype(buffer.dtype), state
        wanted = buffer + jnp.concatenate([left.reshape(-1) for left in state])
        total, stood = reduce(comm, wanted)
        left = bucket._replace(buffer=(wanted - stood).astype(wanted.dtype))
        return total.astype(buffer.dtype), tuple(split(left))

    return Hook(init, apply, name)


def _to_int8(x: Float[Array, "... m"], block: int) -> Int8[Array, "... k"]:
    """Rounds rows of whole blocks to bytes: numbers from −127 to 127, then the blocks' scales, exactly."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # XLA:CPU's maximum passes over a NaN. With a scale of NaN the whole block is NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True), largest / 127, jnp.nan)
    numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    words = jax.lax.bitcast_convert_type(scales[..., 0], jnp.int8)
    return jnp.concatenate([numbers.reshape(x.shape), words.reshape(*x.shape[:-1], -1)], axis=-1)


def _from_int8(message: Int8[Array, "... k"], block: int) -> Float[Array, "... m"]:
    count = message.shape[-1] // (block + BYTES_OF_A_SCALE)
    numbers, words = jnp.split(message, [count * block], axis=-1)
    scales = jax.lax.bitcast_convert_type(words.reshape(*words.shape[:-1], count, BYTES_OF_A_SCALE), np.float32)
    blocks = numbers.reshape(*numbers.shape[:-1], count, block).astype(jnp.float32) * scales[..., None]
    return blocks.reshape(numbers.shape)
