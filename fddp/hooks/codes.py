"""Codes for numbers in few bits: small integers, or signs.

A block of numbers shares a scale, a float32 that is sent with it. If a number of a block is not
finite, the scale is NaN, and so are all decoded numbers of the block.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Alistarh et al.,
"QSGD" (NeurIPS 2017).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Shaped, UInt8

BYTES_OF_A_SCALE = 4


class Code(NamedTuple):
    """A pair of functions that encode numbers in fewer bits, and decode them."""

    encode: Callable[[Float[Array, "... m"], Any], Shaped[Array, "... k"]]
    """(rows of whole blocks, count of numbers in each block) → words. The further numbers of a
    block are padding, and are zeros."""
    decode: Callable[[Shaped[Array, "... k"]], Float[Array, "... m"]]
    """Words → numbers, in float32."""
    block: int = 1
    """Count of numbers in a block."""


def integers(bits: int, block: int) -> Code:
    """Encodes numbers as integers of 8 or 4 bits, scaled by the largest of a block."""
    largest = 2 ** (bits - 1) - 1

    def encode(x: Float[Array, "... m"], counts: ArrayLike) -> UInt8[Array, "... k"]:
        del counts
        blocks = _blocks(x, block)
        scales = _or_nan(blocks, jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest)
        numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
        return _written(_packed(numbers.reshape(x.shape), bits), scales)

    def decode(words: UInt8[Array, "... k"]) -> Float[Array, "... m"]:
        packed, scales = _read(words, block * bits // 8)
        numbers = _unpacked(packed, bits).astype(jnp.int32)
        return _scaled(jnp.where(numbers > largest, numbers - 2**bits, numbers), scales, block)

    return Code(encode, decode, block)


def signs(block: int) -> Code:
    """Encodes signs, and the mean absolute value of a block: the scale of least squared error."""

    def encode(x: Float[Array, "... m"], counts: ArrayLike) -> UInt8[Array, "... k"]:
        blocks = _blocks(x, block)
        sizes = jnp.sum(jnp.abs(blocks), axis=-1, keepdims=True) / jnp.maximum(counts, 1)[..., None]
        return _written(
            _packed((x >= 0).astype(jnp.int8), 1), _or_nan(blocks, sizes.astype(jnp.float32))
        )

    def decode(words: UInt8[Array, "... k"]) -> Float[Array, "... m"]:
        packed, scales = _read(words, block // 8)
        return _scaled(2 * _unpacked(packed, 1).astype(jnp.int8) - 1, scales, block)

    return Code(encode, decode, block)


def _blocks(x: Float[Array, "... m"], block: int) -> Float[Array, "... n block"]:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)


def _or_nan(
    blocks: Float[Array, "... n block"], scales: Float[Array, "... n 1"]
) -> Float[Array, "... n 1"]:
    """Makes the scale NaN if a block is not finite: the maximum of XLA:CPU ignores a NaN."""
    return jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True), scales, jnp.nan)


def _packed(numbers: Int[Array, "... m"], bits: int) -> UInt8[Array, "... k"]:
    """Packs as many numbers into a byte as fit, the first in the lowest bits."""
    per_byte = 8 // bits
    low = numbers.astype(jnp.uint8).reshape(*numbers.shape[:-1], -1, per_byte) & (2**bits - 1)
    return jnp.sum(low << (bits * jnp.arange(per_byte, dtype=jnp.uint8)), axis=-1, dtype=jnp.uint8)


def _unpacked(packed: UInt8[Array, "... k"], bits: int) -> UInt8[Array, "... m"]:
    per_byte = 8 // bits
    numbers = (packed[..., None] >> (bits * jnp.arange(per_byte, dtype=jnp.uint8))) & jnp.uint8(
        2**bits - 1
    )
    return numbers.reshape(*packed.shape[:-1], -1)


def _written(
    packed: UInt8[Array, "... k"], scales: Float[Array, "... n 1"]
) -> UInt8[Array, "... l"]:
    """Appends the scales, as bytes, to the packed numbers."""
    words = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
    return jnp.concatenate([packed, words.reshape(*packed.shape[:-1], -1)], axis=-1)


def _read(
    words: UInt8[Array, "... l"], block_bytes: int
) -> tuple[UInt8[Array, "... k"], Float[Array, "... n"]]:
    """Splits words into packed bytes and scales: the inverse of `_written`."""
    count = words.shape[-1] // (block_bytes + BYTES_OF_A_SCALE)
    packed, scales = jnp.split(words, [count * block_bytes], axis=-1)
    scales = scales.reshape(*scales.shape[:-1], count, BYTES_OF_A_SCALE)
    return packed, jax.lax.bitcast_convert_type(scales, np.float32)


def _scaled(
    numbers: Int[Array, "... m"], scales: Float[Array, "... n"], block: int
) -> Float[Array, "... m"]:
    return (_blocks(numbers, block) * scales[..., None]).reshape(numbers.shape)
