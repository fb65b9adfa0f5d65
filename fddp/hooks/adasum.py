"""A hook that adds gradients of different directions, and averages those of equal direction."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fddp.buckets import ShardLayout
from fddp.comm import Communicator
from fddp.hooks.hook import (
    GradBucket,
    Hook,
    State,
    flat_buffer,
    leaves_of_buffer,
    nothing,
    of_floats,
)


def adasum() -> Hook:
    """Adds gradients pair by pair, less half of their common component (Horovod's `op=hvd.Adasum`).

    Orthogonal gradients are summed, equal gradients averaged. So a larger batch needs no other
    learning rate. Leaves are treated separately. Replicas must have equal numbers of rows.

    Returns:
      The hook: an all-to-all, a few numbers per leaf and pair, and an all-gather. These are the
      bytes of an all-reduce, also in `bf16()` and `fp16()`.

    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021),
    equation 6.
    """

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        whole_leaves = leaves_of_buffer(bucket.buffer, bucket.leaves)
        layouts = [ShardLayout(leaf.shape, comm.size) for leaf in bucket.leaves]
        leaves = [layout.split(leaf) for layout, leaf in zip(layouts, whole_leaves)]
        sizes = [leaf.shape[1] for leaf in leaves]
        # Row i is this replica's shard of the gradients of replica i.
        shards = comm.all_to_all(jnp.concatenate(leaves, axis=1))
        shards = shards.astype(jnp.promote_types(shards.dtype, jnp.float32))
        while len(shards) > 1:
            even = len(shards) // 2 * 2
            shards = jnp.concatenate(
                [_of_pairs(comm, shards[:even:2], shards[1:even:2], sizes), shards[even:]]
            )
        rows = jnp.split(
            comm.all_gather(shards[0].astype(bucket.buffer.dtype)), np.cumsum(sizes)[:-1], axis=1
        )
        sums = (layout.join(row) for layout, row in zip(layouts, rows))
        # The step divides by the weight of all replicas, as for a sum.
        return comm.size * flat_buffer(sums), memory

    return of_floats(Hook(nothing, apply, "adasum"))


def _of_pairs(
    comm: Communicator, a: Float[Array, "pairs n"], b: Float[Array, "pairs n"], sizes: list[int]
) -> Float[Array, "pairs n"]:
    """Adds a (1 − a·b / 2|a|²) and b (1 − a·b / 2|b|²), with products over all shards of a leaf."""
    ends = np.cumsum(sizes)[:-1]  # of all leaves but the last

    def products(x: Array, y: Array) -> Array:
        return jnp.stack([jnp.sum(leaf, axis=1) for leaf in jnp.split(x * y, ends, axis=1)])

    local = jnp.stack([products(a, b), products(a, a), products(b, b)])
    ab, aa, bb = comm.exact_sum(local.reshape(-1)).reshape(local.shape)

    def factor(square: Array) -> Array:
        projection = jnp.where(square > 0, ab / jnp.where(square > 0, 2 * square, 1), 0)
        return jnp.repeat(
            1 - projection, jnp.array(sizes), axis=0, total_repeat_length=sum(sizes)
        ).T

    return factor(aa) * a + factor(bb) * b
