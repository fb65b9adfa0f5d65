"""A hook that sends only the chunks of a bucket with the largest norms over all replicas."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, join_memory, of_floats, split_memory
from fddp.wording import check_range, check_whole


def chunks(share: float = 0.1, *, chunk: int = 32_768, momentum: float = 0.0) -> Hook:
    """Sums only the chunks of a bucket with the largest norms over all replicas.

    All replicas send the same chunks. So their sum is an all-reduce, without places. Unsent chunks
    are added to the next step's gradients.

    Args:
      share: share of a bucket's chunks that is sent, above 0 and up to 1.
      chunk: count of numbers in a chunk.
      momentum: SGD's momentum, from 0 to below 1, which continues while a chunk is not sent. Each
        replica then accumulates the momentum of its gradients, and resets it when the chunk is sent
        (the paper's masking); use SGD without momentum as the optimizer. 0: each replica
        accumulates its gradients.

    Returns:
      The hook: an all-reduce of one float per chunk, and an all-reduce of the chunks to send.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: `share` or `momentum` is not a number.

    Source: GradientFlow's coarse-grained sparsity (Sun et al., 2019); momentum as in Deep Gradient
      Compression (Lin et al., 2018).
    """
    share = check_range("chunks: share", share, "above 0 and at most 1", lambda x: 0 < x <= 1)
    check_whole("chunks: chunk", chunk, 1)
    momentum = check_range(
        "chunks: momentum", momentum, "0 or more and below 1", lambda x: 0 <= x < 1
    )

    names = ("left", "speed") if momentum else ("left",)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return dict.fromkeys(names, jnp.zeros(leaf.shape, leaf.dtype))

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        velocity = bucket.buffer
        if momentum:
            velocity = velocity + momentum * join_memory(memory, "speed")
        compensated = velocity + join_memory(memory, "left")
        total, mask = _largest(comm, compensated, share, chunk)
        residuals = (compensated, velocity)[: len(names)]
        unsent = (jnp.where(mask, 0, x) for x in residuals)
        return total, split_memory(bucket.leaves, names, unsent)

    name = f"chunks({share}, chunk={chunk}, momentum={momentum})"
    return of_floats(Hook(init, apply, name))


def _largest(comm: Communicator, x: Array, share: float, chunk: int) -> tuple[Array, Array]:
    """Returns the sum of the largest chunks, zero elsewhere, and their mask."""
    chunk = min(chunk, x.size)
    rows = jnp.pad(x, (0, -x.size % chunk)).reshape(-1, chunk)
    norms = comm.exact_sum(jnp.mean(jnp.abs(rows.astype(jnp.float32)), axis=1))
    # Chunks that are not finite rank first, or they would never be sent.
    _, places = jax.lax.top_k(
        jnp.where(jnp.isfinite(norms), norms, jnp.inf), math.ceil(share * len(rows))
    )
    sums = comm.all_reduce(rows[places].reshape(-1)).reshape(-1, chunk)
    mask = jnp.zeros(len(rows), bool).at[places].set(True)
    total = jnp.zeros_like(rows).at[places].set(sums)
    return total.reshape(-1)[: x.size], jnp.repeat(mask, chunk)[: x.size]
