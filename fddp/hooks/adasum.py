"""A hook that adds gradients in different directions, and averages gradients in the same direction."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fddp.buckets import as_rows, of_rows
from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, nothing, split
from fddp.hooks.narrow import is_float


def adasum() -> Hook:
    """Adds the replicas' gradients pair by pair, each less half the other's part along it (Horovod's `op=hvd.Adasum`).

    Orthogonal gradients are summed, equal ones averaged: a larger batch then needs no other learning rate. Each leaf is
    taken by itself. Replicas must bring equally many rows.

    Returns:
      The hook: an all-to-all, a few numbers for each leaf and pair, and an all-gather; the bytes of an all-reduce, in
      `bf16()` and `fp16()` too.

    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021), equation 6.
    """

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        if not is_float(bucket.buffer.dtype):
            return comm.all_reduce(bucket.buffer), state
        leaves = [as_rows(leaf, comm.size) for leaf in split(bucket)]
        sizes = [leaf.shape[1] for leaf in leaves]
        # Row i has this replica's part of each leaf's gradient on replica i.
        parts = comm.all_to_all(jnp.concatenate(leaves, axis=1))
        parts = parts.astype(jnp.promote_types(parts.dtype, jnp.float32))
        while len(parts) > 1:
            even = len(parts) // 2 * 2
            parts = jnp.concatenate([_of_pairs(comm, parts[:even:2], parts[1:even:2], sizes), parts[even:]])
        rows = jnp.split(comm.all_gather(parts[0].astype(bucket.buffer.dtype)), _ends(sizes), axis=1)
        whole = [of_rows(row, leaf.shape).reshape(-1) for row, leaf in zip(rows, bucket.leaves)]
        # The step divides by the weights of all replicas, as if this were a sum.
        return comm.size * jnp.concatenate(whole), state

    return Hook(nothing, apply, "adasum")


def _of_pairs(
    comm: Communicator, a: Float[Array, "pairs n"], b: Float[Array, "pairs n"], sizes: list[int]
) -> Float[Array, "pairs n"]:
    """Adds a (1 − a·b / 2|a|²) and b (1 − a·b / 2|b|²) leaf by leaf; the products are sums over all replicas' parts."""

    def products(x: Array, y: Array) -> Array:
        return jnp.stack([jnp.sum(part, axis=1) for part in jnp.split(x * y, _ends(sizes), axis=1)])

    three = jnp.stack([products(a, b), products(a, a), products(b, b)])
    both, of_a, of_b = comm.exact_sum(three.reshape(-1)).reshape(three.shape)

    def share(square: Array) -> Array:
        less = jnp.where(square > 0, both / jnp.where(square > 0, 2 * square, 1), 0)
        return jnp.repeat(1 - less, jnp.array(sizes), axis=0, total_repeat_length=sum(sizes)).T

    return share(of_a) * a + share(of_b) * b


def _ends(sizes: list[int]) -> list[int]:
    """Places at which one leaf's part ends and the next begins."""
    return [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
