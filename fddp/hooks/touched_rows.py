"""Sums an embedding's gradient by its touched rows and their numbers, not as the whole table.

A message of rows has a fixed capacity, and is all-gathered. If a replica touches more rows, the
table is all-reduced. So the sum is exact for any number of touched rows.

Source: `sparse=True` of `Embedding` in PyTorch, whose gradients DDP gathers; Kim et al., "Parallax"
(EuroSys 2019).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt8

from fddp.buckets import Rows, from_words, to_words
from fddp.comm import Communicator, add_bytes, as_uint32, count_aside

NUMBER_BYTES = 4


def sum_of_table(
    rows: Rows, comm: Communicator, flat: Shaped[Array, " n"], memory: Any
) -> tuple[Shaped[Array, " n"], Any]:
    """Sums a flat table over replicas."""
    table = flat.reshape(rows.of, -1)
    touched = jnp.any(table != 0, axis=1)
    (numbers,) = jnp.nonzero(touched, size=rows.most, fill_value=rows.of)
    values = to_words(table.at[numbers].get(mode="fill", fill_value=0))
    more = jnp.sum(touched) > rows.most
    message = [_bytes(numbers.astype(jnp.int32)), _bytes(values), more[None].astype(jnp.uint8)]
    received = comm.all_gather(jnp.concatenate(message))

    def add(total: Array, message: UInt8[Array, " m"]) -> tuple[Array, None]:
        header, body = jnp.split(message[:-1], [NUMBER_BYTES * rows.most])
        numbers = jax.lax.bitcast_convert_type(header.reshape(-1, NUMBER_BYTES), jnp.int32)
        words = body.reshape(*values.shape, values.dtype.itemsize)
        summand = from_words(jax.lax.bitcast_convert_type(words, values.dtype), flat)
        return total.at[numbers].add(summand.astype(total.dtype), mode="drop"), None

    def whole() -> tuple[Array, Array]:
        total, nbytes = count_aside(comm, lambda comm: comm.all_reduce(flat))
        return total, as_uint32(nbytes)

    # Rows are added replica by replica, so that all replicas compute the same bits; those of 16-bit
    # floats in 32 bits.
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    total, _ = jax.lax.scan(add, jnp.zeros(table.shape, wide), received)
    few = total.astype(flat.dtype).reshape(-1)
    total, nbytes = jax.lax.cond(jnp.any(received[:, -1]), whole, lambda: (few, jnp.uint32(0)))
    add_bytes(comm, nbytes)
    return total, memory


def _bytes(x: Array) -> UInt8[Array, " m"]:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)
