"""Turns arrays into integers of the same bits, whose sum is a broadcast where all replicas but one have zeros."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def to_words(x: Array) -> Array:
    """Turns an array into integers of the same bits, whose sum is a broadcast where all replicas but one have zeros.

    A sum of floats is no broadcast: it loses the sign of a zero, the payload of a NaN and, on CPUs, subnormal numbers.

    Args:
      x: an array of any dtype, also random keys.

    Returns:
      Integers or booleans.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.int8) if sub_byte(x.dtype) else x  # XLA sends no integers of less than 8 bits
    if sub_byte(x.dtype):
        x = x.astype(jnp.float16)  # holds them exactly
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def from_words(words: Array, like: Array) -> Array:
    """Turns integers back into an array of the dtype of `like`: the inverse of `to_words`."""
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
