"""Sums over virtual replicas in a fixed binary tree, whichever replica computes which of them.

A sum of floats depends on its order. Here the order is a tree over the numbers of virtual replicas alone: each half is
added up by itself, then both are added. Summands are moved to the replica that adds them, so that no transport adds
anything in an order of its own. A replica adds up a block before it sends: a subtree of virtual replicas, equally many
on all replicas.

Source: EasyScale (Li et al., SC 2023); Tree-Based Invariant Kernels (Zhang et al. 2025), within and across devices.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator

Number = TypeVar("Number")


def block_of(virtual: int, each: int) -> int:
    """Finds the size of a block: the number of virtual replicas that a replica can add up before it sends.

    Args:
      virtual: number of virtual replicas.
      each: number of them that each replica stands for.

    Returns:
      The size of the largest subtrees that lie whole on one replica, on every replica; 1: only single virtual replicas.

    Example:
      >>> [block_of(12, each) for each in (12, 6, 3, 4)]
      [12, 6, 3, 1]
    """
    block = virtual
    while each % block:
        block = block // 2 if block % 2 == 0 else 1
    return block


def tree_sum(numbers: Sequence[Number], add: Callable[[Number, Number], Number]) -> Number:
    """Adds numbers in the tree.

    Args:
      numbers: at least one number.
      add: adds two numbers.

    Returns:
      Their sum.

    Example:
      >>> tree_sum(["a", "b", "c", "d", "e"], lambda x, y: f"({x}+{y})")
      '(((a+b)+c)+(d+e))'
    """
    if len(numbers) == 1:
        return numbers[0]
    half = len(numbers) - len(numbers) // 2
    return add(tree_sum(numbers[:half], add), tree_sum(numbers[half:], add))


def merges(count: int) -> tuple[int, ...]:
    """Counts the sums of the tree that each number completes, if numbers come one after the other.

    Sums that wait for more numbers lie on a stack, whose height is at most log₂ of the count, plus one.

    Args:
      count: how many numbers there are, at least one.

    Returns:
      For each number, how often the two topmost sums of the stack are added after the number was put there.

    Example:
      >>> merges(5)
      (0, 1, 1, 0, 2)
    """
    if count == 1:
        return (0,)
    half = count - count // 2
    counts = merges(half) + merges(count - half)
    return (*counts[:-1], counts[-1] + 1)


def tree_reduce(comm: Communicator, message: Shaped[Array, " blocks*n"], blocks: int) -> Shaped[Array, " n"]:
    """Sums the blocks of all replicas in the tree: each replica adds a part of the numbers, and all gather the parts.

    Args:
      comm: the replicas' communicator.
      message: this replica's blocks, one behind the other.
      blocks: number of blocks.

    Returns:
      The sum, the same bits on all replicas. With one block each, the bytes sent are those of an all-reduce.
    """
    if comm.size == 2 and blocks == 1:
        return comm.all_reduce(message)  # two numbers have the same sum in either order
    size = message.shape[0] // blocks
    moved = comm.all_to_all(parts_for_each(comm.size, message, blocks))
    return comm.all_gather(sum_of_parts(moved, blocks)).reshape(-1)[:size]


def parts_for_each(replicas: int, message: Shaped[Array, " blocks*n"], blocks: int) -> Shaped[Array, "replicas m"]:
    """Cuts a message into the parts that each replica adds: equally many numbers of every block, zeros at the end."""
    rows = message.reshape(blocks, -1)
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % replicas)))
    return padded.reshape(blocks, replicas, -1).swapaxes(0, 1).reshape(replicas, -1)


def sum_of_parts(parts: Shaped[Array, "replicas m"], blocks: int) -> Shaped[Array, " n"]:
    """Sums in the tree the parts that came from each replica, block by block."""
    return tree_sum(list(parts.reshape(parts.shape[0] * blocks, -1)), jnp.add)
