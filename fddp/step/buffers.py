"""Synchronizes the buffers (the model state) of replicas: broadcast, averaged, or left as they are.

The option `broadcast_buffers` is the rule: True, "mean", or False for local buffers.

Source: `broadcast_buffers` and `_find_common_rank` in PyTorch's `distributed.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import from_words, to_words
from fddp.comm import Communicator
from fddp.losses import Joined
from fddp.step.options import Buffers


def send_buffers(
    option: Buffers, comm: Communicator, model_state: PyTree, rows: PyTree
) -> tuple[Any, Any]:
    """Returns the values to sum over replicas, next to loss and metrics, and local buffers."""
    if option is False or model_state is None:
        return None, model_state
    # One replica's buffers plus zeros of all others: the sum is the broadcast, and arrives
    # before the next forward pass.
    leads = rows.leads if isinstance(rows, Joined) else None
    if leads is None:
        is_source = comm.replica_index() == 0
        active = jnp.bool_(True)
    else:
        is_source = jnp.any(leads)
        active = jnp.any(jnp.asarray(rows.share) > 0)

    def part(x: Array) -> Array:
        if _is_averaged(option, x):
            wide = _wide(x)
            return jnp.where(active, wide, jnp.zeros_like(wide))
        words = to_words(x)
        return jnp.where(is_source, words, jnp.zeros_like(words))

    parts = jax.tree.map(part, model_state)
    if leads is None:
        return (parts, None), None
    # The number of contributors is known only after the sum, and may be 0.
    averages = any(_is_averaged(option, x) for x in jax.tree.leaves(model_state))
    contributes = active if averages else is_source
    return (parts, contributes.astype(jnp.float32)), None


def land_buffers(
    option: Buffers, comm: Communicator, old: PyTree, sums: PyTree, local: PyTree
) -> Any:
    """Makes the new buffers from the sums; under `fddp.join`, those of replicas with data."""
    if sums is None:
        return local
    totals, count = sums
    divisor = comm.size
    if count is not None:
        divisor = jnp.maximum(count, 1)

    def landed(old: Array, total: Array) -> Array:
        if _is_averaged(option, old):
            new = (total / divisor).astype(old.dtype)
        else:
            new = from_words(total, old)
        return new if count is None else jnp.where(count > 0, new, old)

    return jax.tree.map(landed, old, totals)


def _is_averaged(option: Buffers, x: Array) -> bool:
    """True for floats with "mean": integers are broadcast."""
    return option == "mean" and jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(x: Array) -> Array:
    """Widens floats to 32 bits: the sum of the replicas' buffers may overflow float16."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
