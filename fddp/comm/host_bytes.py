"""Bytes that hosts exchange: gathers of unequal lengths, and conversions of arrays."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fddp.comm.placement import whole_here

if TYPE_CHECKING:  # a group moves bytes, too
    from fddp.comm.group import Group

CHUNK_BYTES = 64 * 2**20


def gather_bytes(group: "Group", data: bytes) -> list[bytes]:
    """Returns the bytes of each process on every process, sent in chunks of at most 64 MiB."""
    lengths = group.all_gather(np.int64(len(data))).tolist()
    padded = np.frombuffer(data.ljust(max(lengths)), np.uint8)
    chunks = [
        group.all_gather(padded[begin : begin + CHUNK_BYTES])
        for begin in range(0, padded.size, CHUNK_BYTES)
    ]
    rows = np.concatenate([np.zeros((group.processes, 0), np.uint8), *chunks], axis=1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]


def one_array(x: Any) -> np.ndarray:
    """Converts an argument to one array, and refuses trees, text and objects."""
    if isinstance(x, Tracer):
        raise TypeError(
            "all_gather and all_reduce of a group exchange the host's arrays and cannot be called "
            "under jax.jit, grad or vmap; use jax.lax.psum over group.axis_name in a loss, or "
            "fddp.all_reduce inside jax.shard_map."
        )
    try:
        array = np.asarray(x)
    except (ValueError, TypeError):  # arrays of unequal shapes, random keys
        array = np.asarray(None)
    if array.dtype.kind in "OUSMm":
        raise TypeError(
            "all_gather and all_reduce of a group take one numeric array or number, got "
            f"{type(x).__name__} {x!r:.80}: call them for each leaf, with "
            "jax.tree.map(group.all_reduce, tree); all_gather_object takes any object."
        )
    return array


def hosted(x: Any) -> np.ndarray:
    """Copies an array to the host; random keys become their words."""
    if _is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(whole_here(x))


def from_hosted(value: np.ndarray, like: Any) -> Any:
    """Converts words to random keys if `like` holds keys, else returns the array unchanged."""
    if not _is_key(like):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
