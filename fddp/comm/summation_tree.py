"""Sums over virtual replicas in a fixed binary tree, for any assignment to replicas.

A sum of floats depends on its order. Here the order depends on the numbers of the virtual replicas
only: the sum of each half, then the sum of both. Summands are moved to the replica that adds them,
so that no transport has an order of its own. A replica adds up a block before it sends: a subtree
of virtual replicas, of one size on all replicas.

Source: EasyScale (Li et al., SC 2023); Tree-Based Invariant Kernels (Zhang et al. 2025), within and
across devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator


def block_of(virtual: int, each: int) -> int:
    """Returns the number of virtual replicas in a block, the largest subtree inside any replica.

    `each` of the `virtual` replicas are on one replica. A block of 1 is a single virtual replica.

    >>> [block_of(12, each) for each in (12, 6, 3, 4)]
    [12, 6, 3, 1]
    """
    block = virtual
    while each % block:
        if block % 2:
            return 1
        block //= 2
    return block


def tree_sum(
    numbers: Sequence[Any], add: Callable[[Any, Any], Any], of: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Adds `of(x)` for one number or more, in the order of the tree, each sum as soon as possible.

    So at most log₂ of their count, plus one, exist at once.

    >>> tree_sum(["a", "b", "c", "d", "e"], lambda x, y: f"({x}+{y})")
    '(((a+b)+c)+(d+e))'
    """
    if len(numbers) == 1:
        return of(numbers[0])
    half = len(numbers) - len(numbers) // 2
    return add(tree_sum(numbers[:half], add, of), tree_sum(numbers[half:], add, of))


def tree_reduce(
    comm: Communicator, message: Shaped[Array, " blocks*n"], blocks: int
) -> Shaped[Array, " n"]:
    """Sums the blocks of all replicas in the tree, to the same bits on all replicas."""
    size = message.shape[0] // blocks
    # Equal parts of every block for each replica, padded with zeros.
    rows = jnp.pad(message.reshape(blocks, -1), ((0, 0), (0, -size % comm.size)))
    parts = rows.reshape(blocks, comm.size, -1).swapaxes(0, 1).reshape(comm.size, -1)
    moved = comm.all_to_all(parts).reshape(comm.size * blocks, -1)
    return comm.all_gather(tree_sum(list(moved), jnp.add)).reshape(-1)[:size]


def tree_bytes(replicas: int, blocks: int, message: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes that each replica sends in `tree_reduce`, for one block's message."""
    part = -(-message.size // replicas)
    return (replicas - 1) * part * (blocks + 1) * message.dtype.itemsize
