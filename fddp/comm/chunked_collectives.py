"""Scatters and gathers long parts in short pieces.

Gloo has one connection for both directions between two processes. A long part that travels one way holds up the part
that comes back, so on a wire the two take turns. Short pieces share the wire.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator

GLOO_BYTES = 2**19


def scattered(comm: Communicator, rows: Shaped[Array, "replicas n"], most: int | None) -> Shaped[Array, " n"]:
    """Sums row i over replicas for replica i, in pieces; the numbers are the same as in one go.

    Args:
      comm: the replicas' communicator.
      rows: this replica's rows, one for each replica.
      most: bytes of a piece of a row; None: the whole row.

    Returns:
      This replica's row.
    """
    size, length = rows.shape
    pieces = _cut(rows, most).reshape(size, -1, _length(rows, most)).swapaxes(0, 1)
    return _each(comm.reduce_scatter, pieces).reshape(-1)[:length]


def gathered(comm: Communicator, x: Shaped[Array, " n"], most: int | None) -> Shaped[Array, "replicas n"]:
    """Gathers every replica's array on every replica, in pieces.

    Args:
      comm: the replicas' communicator.
      x: this replica's array.
      most: bytes of a piece; None: the whole array.

    Returns:
      One row for each replica.
    """
    pieces = _cut(x, most).reshape(-1, _length(x, most))
    return _each(comm.all_gather, pieces).swapaxes(0, 1).reshape(comm.size, -1)[:, : x.size]


def _length(x: Array, most: int | None) -> int:
    """Number of elements of a piece, the same for all pieces."""
    length = x.shape[-1]
    return -(-length // max(1, -(-length * x.dtype.itemsize // most))) if most and length else max(1, length)


def _cut(x: Array, most: int | None) -> Array:
    """Pads the last dim, so that all pieces are full."""
    filled = -x.shape[-1] % _length(x, most)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, filled)])


def _each(f: Callable[[Array], Array], pieces: Array) -> Array:
    """Sends pieces one after the other: on one communicator two at once would mix."""
    return f(pieces[0])[None] if len(pieces) == 1 else jax.lax.map(f, pieces)
