"""A hook that sends only the chunks of a bucket with the largest norms over all replicas, and remembers the rest."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, split
from fddp.hooks.narrow import is_float
from fddp.wording import check_whole


def chunks(share: float = 0.1, *, chunk: int = 32_768, momentum: float = 0.0) -> Hook:
    """Sums the chunks of a bucket with the largest norms over all replicas, and leaves out the others.

    All replicas send the same chunks, so that their sum is an all-reduce, and no number travels with its place. Chunks
    that are left out are added to the next step's gradients.

    Args:
      share: share of a bucket's chunks that is sent, above 0 and up to 1.
      chunk: count of numbers that are sent together.
      momentum: SGD's momentum, from 0 to below 1, to be kept up while a chunk waits. Each replica then adds up the
        momentum of its own gradients, and begins anew when the chunk is sent (the paper's masking); give the optimizer
        SGD without momentum. 0: each replica adds up its gradients.

    Returns:
      The hook: an all-reduce of a float for each chunk, and one of the chunks that are sent.

    Raises:
      ValueError: a number is out of its range.

    Source: GradientFlow's coarse-grained sparsity (Sun et al., 2019); momentum as in Deep Gradient Compression (Lin et
      al., 2018).
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"chunks: share must be above 0 and at most 1, got {share!r}.")
    check_whole("chunks: chunk", chunk, 1)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"chunks: momentum must be 0 or more and below 1, got {momentum!r}.")

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not is_float(leaf.dtype):
            return ()
        left = jnp.zeros(leaf.shape, leaf.dtype)
        return {"left": left} | ({"speed": left} if momentum else {})

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        if not is_float(bucket.buffer.dtype):
            return comm.all_reduce(bucket.buffer), state
        speed = bucket.buffer + momentum * _joined(state, "speed") if momentum else bucket.buffer
        wanted = speed + _joined(state, "left")
        total, sent = _largest(comm, wanted, share, chunk)
        kept = {"left": wanted} | ({"speed": speed} if momentum else {})
        leaves = {name: split(bucket._replace(buffer=jnp.where(sent, 0, x))) for name, x in kept.items()}
        return total, tuple(dict(zip(leaves, values)) for values in zip(*leaves.values()))

    return Hook(init, apply, f"chunks({share}, chunk={chunk}, momentum={momentum})")


def _largest(comm: Communicator, x: Array, share: float, chunk: int) -> tuple[Array, Array]:
    """Sums over replicas the chunks that are sent; gives the sum, zero elsewhere, and a mask of these chunks."""
    chunk = min(chunk, x.size)
    rows = jnp.pad(x, (0, -x.size % chunk)).reshape(-1, chunk)
    norms = comm.exact_sum(jnp.mean(jnp.abs(rows.astype(jnp.float32)), axis=1))
    # Chunks that are not finite, with NaN too, are sent before all others, or they would stay for ever.
    _, places = jax.lax.top_k(jnp.where(jnp.isfinite(norms), norms, jnp.inf), math.ceil(share * len(rows)))
    sums = comm.all_reduce(rows[places].reshape(-1)).reshape(-1, chunk)
    sent = jnp.zeros(len(rows), bool).at[places].set(True)
    total = jnp.zeros_like(rows).at[places].set(sums)
    return total.reshape(-1)[: x.size], jnp.repeat(sent, chunk)[: x.size]


def _joined(state: State, name: str) -> Array:
    return jnp.concatenate([leaf[name].reshape(-1) for leaf in state])
