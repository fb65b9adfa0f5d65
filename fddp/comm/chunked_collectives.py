"""Scatters and gathers long arrays in short pieces.

Gloo has one connection for both directions between two processes. A long part sent one way delays
the part sent the other way, so the directions alternate on the wire. Short pieces share it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator

GLOO_BYTES = 2**19


def scattered(
    comm: Communicator, rows: Shaped[Array, "replicas n"], piece_bytes: int | None
) -> Shaped[Array, " n"]:
    """Sums row i over replicas for replica i, in pieces; None: one piece, with the same bits."""
    size, length = rows.shape
    pieces = _cut(rows, piece_bytes).reshape(size, -1, _length(rows, piece_bytes)).swapaxes(0, 1)
    return _each(comm.reduce_scatter, pieces).reshape(-1)[:length]


def gather_in_pieces(
    comm: Communicator, x: Shaped[Array, " n"], piece_bytes: int | None
) -> Shaped[Array, "replicas n"]:
    """Gathers every replica's array on every replica, in pieces; None: one piece."""
    pieces = _cut(x, piece_bytes).reshape(-1, _length(x, piece_bytes))
    return _each(comm.all_gather, pieces).swapaxes(0, 1).reshape(comm.size, -1)[:, : x.size]


def _length(x: Array, piece_bytes: int | None) -> int:
    """Returns the number of elements of a piece, equal for all pieces."""
    length = max(1, x.shape[-1])
    if piece_bytes is None:
        return length
    pieces = max(1, -(-length * x.dtype.itemsize // piece_bytes))
    return -(-length // pieces)


def _cut(x: Array, piece_bytes: int | None) -> Array:
    """Pads the last dim to a multiple of the piece length."""
    padding = -x.shape[-1] % _length(x, piece_bytes)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])


def _each(f: Callable[[Array], Array], pieces: Array) -> Array:
    """Applies a collective to pieces in order: two at once would mix on one communicator."""
    if len(pieces) == 1:
        return f(pieces[0])[None]
    return jax.lax.map(f, pieces)
