"""Parts that are scattered and gathered piece by piece.

Gloo has one connection for both directions between two processes, and a long part on its way there holds up the one
that comes back: on a wire the two then take turns. Short ones share it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator

GLOO_BYTES = 2**19


def scattered(comm: Communicator, rows: Shaped[Array, "replicas n"], most: int | None) -> Shaped[Array, " n"]:
    """Row i, summed over replicas, on replica i: the same numbers as at once.

    Args:
      comm: of the replicas.
      rows: what each has.
      most: bytes of a piece of a row; None: all of it.

    Returns:
      This replica's row.
    """
    size, length = rows.shape
    pieces = _cut(rows, most).reshape(size, -1, _length(rows, most)).swapaxes(0, 1)
    return _each(comm.reduce_scatter, pieces).reshape(-1)[:length]


def gathered(comm: Communicator, x: Shaped[Array, " n"], most: int | None) -> Shaped[Array, "replicas n"]:
    """Every replica's array, on every replica.

    Args:
      comm: of the replicas.
      x: what this one has.
      most: bytes of a piece; None: all of it.

    Returns:
      One row for each.
    """
    pieces = _cut(x, most).reshape(-1, _length(x, most))
    return _each(comm.all_gather, pieces).swapaxes(0, 1).reshape(comm.size, -1)[:, : x.size]


def _length(x: Array, most: int | None) -> int:
    """Elements of a piece: equally many in all."""
    length = x.shape[-1]
    return -(-length // max(1, -(-length * x.dtype.itemsize // most))) if most and length else max(1, length)


def _cut(x: Array, most: int | None) -> Array:
    """Filled up, so that all pieces are full."""
    filled = -x.shape[-1] % _length(x, most)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, filled)])


def _each(f: Callable[[Array], Array], pieces: Array) -> Array:
    """One after the other: on one communicator two at once would mix."""
    return f(pieces[0])[None] if len(pieces) == 1 else jax.lax.map(f, pieces)
