"""Encodes numbers as integers of 8 or 4 bits, scaled by the largest of a block.

The scale, a float32, is sent with the block. If a number of a block is not finite, the scale is
NaN, and so are all decoded numbers of the block.

Source: Alistarh et al., "QSGD" (NeurIPS 2017).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

BYTES_OF_A_SCALE = 4


def encode(x: Float[Array, "... m"], bits: int, block: int) -> UInt8[Array, "... k"]:
    """Encodes rows of whole blocks."""
    largest = 2 ** (bits - 1) - 1
    blocks = _blocks(x, block)
    # The maximum of XLA:CPU ignores a NaN.
    finite = jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True)
    scales = jnp.where(finite, jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest, jnp.nan)
    numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    packed = _packed(numbers.reshape(x.shape), bits)
    words = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
    return jnp.concatenate([packed, words.reshape(*packed.shape[:-1], -1)], axis=-1)


def decode(words: UInt8[Array, "... k"], bits: int, block: int) -> Float[Array, "... m"]:
    """Decodes rows, in float32: the inverse of `encode`."""
    block_bytes = block * bits // 8
    count = words.shape[-1] // (block_bytes + BYTES_OF_A_SCALE)
    packed, scales = jnp.split(words, [count * block_bytes], axis=-1)
    scales = scales.reshape(*scales.shape[:-1], count, BYTES_OF_A_SCALE)
    scales = jax.lax.bitcast_convert_type(scales, np.float32)
    numbers = _unpacked(packed, bits).astype(jnp.int32)
    numbers = jnp.where(numbers >= 2 ** (bits - 1), numbers - 2**bits, numbers)
    return (_blocks(numbers, block) * scales[..., None]).reshape(numbers.shape)


def _blocks(x: Array, block: int) -> Float[Array, "... n block"]:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)


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
