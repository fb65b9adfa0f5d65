"""What moves arrays between the programs of replicas, and bytes between their hosts."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import UInt8

Bytes: TypeAlias = UInt8[np.ndarray, " n"]


class Transport(NamedTuple):
    """Collectives between programs; they block the calling thread."""

    all_reduce: Callable[[jax.Array], jax.Array]
    """Sum over replicas of what each has for itself, flat."""
    reduce_scatter: Callable[[jax.Array], jax.Array]
    """The same, cut into equal parts, of which each replica gets its own."""
    all_gather: Callable[[jax.Array], jax.Array]
    """What each has for itself, flat, one behind the other, on all of them."""
    tree_reduce: Callable[[jax.Array, int], jax.Array]
    """The sum of so many blocks of each, flat, one behind the other, in the tree of virtual replicas."""
    clones: "tuple[Transport, ...]" = ()
    """Transports whose collectives may run side by side, each message on the next; none: this one alone."""


class Hosts(NamedTuple):
    """Collectives of the processes themselves."""

    all_gather: Callable[[Bytes], UInt8[np.ndarray, "processes n"]]
    """Equally many bytes from every process, on every process."""
    broadcast: Callable[[Bytes, int], Bytes]
    """`broadcast(data, root)`: root's bytes, on every process."""
