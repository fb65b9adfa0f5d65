"""Reinterprets arrays as integers of the same bits: their sum with zeros is an exact broadcast."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def to_words(x: Array) -> Array:
    """Reinterprets an array of any dtype, or random keys, as integers or booleans.

    If all other replicas add zeros, a sum of the words broadcasts the array. A sum of floats would
    lose the sign of a zero, the payload of a NaN and, on CPUs, subnormal numbers.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        # XLA has no collectives for integers of less than 8 bits.
        return x.astype(jnp.int8) if sub_byte(x.dtype) else x
    if sub_byte(x.dtype):
        x = x.astype(jnp.float16)  # holds them exactly
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def from_words(words: Array, like: Array) -> Array:
    """Reinterprets words as an array of the dtype of `like`: the inverse of `to_words`."""
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


def sub_byte(dtype: DTypeLike) -> bool:
    """True if an element has less than 8 bits."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8
