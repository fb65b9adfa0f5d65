"""Trees of arrays, held against each other leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def close(got: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """The same structure, and numbers that differ by rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


def equal(got: Any, expected: Any) -> None:
    """The same structure and the same numbers; NaN equals NaN."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def bits(tree: Any) -> list[bytes]:
    """The bytes of each leaf; those of a random key are its numbers'."""
    return [np.asarray(_numbers(x)).tobytes() for x in jax.tree.leaves(tree)]


def same_bits(got: Any, expected: Any) -> None:
    """The same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert jax.tree.map(_form, got) == jax.tree.map(_form, expected)
    assert bits(got) == bits(expected)


def same_arrays(got: Any, expected: Any) -> None:
    """The same bits, on the same devices."""
    same_bits(got, expected)
    assert jax.tree.map(_sharding, got) == jax.tree.map(_sharding, expected)


def on_each_device(x: jax.Array) -> list[np.ndarray]:
    """The data of an array on each device, in order."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def _numbers(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _form(x: Any) -> str:
    return f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else type(x).__name__


def _sharding(x: Any) -> Any:
    return getattr(x, "sharding", None)
