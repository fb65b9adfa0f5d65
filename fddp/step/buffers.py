"""Synchronizes the buffers (the model state) of replicas: broadcast, averaged, or left as they are.

A rule is a pair of functions: `send` chooses the values to sum next to the loss and the metrics,
and `land` makes the new buffers from the sums.

Source: `broadcast_buffers` and `_find_common_rank` in PyTorch's `distributed.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import from_words, to_words
from fddp.comm import Communicator
from fddp.losses import Joined


class Buffers(NamedTuple):
    """A rule for buffers."""

    send: Callable[[Communicator, Any, Any], tuple[Any, Any]]
    """(comm, model state, rows) → values to sum over replicas, and buffers that stay local"""
    land: Callable[[Communicator, Any, Any, Any], Any]
    """(comm, old model state, sums, local buffers) → new model state"""


def keep() -> Buffers:
    """Leaves every replica its local buffers."""
    return Buffers(
        lambda comm, model_state, rows: (None, model_state),
        lambda comm, old, sums, local: local,
    )


def broadcast() -> Buffers:
    """Copies the buffers of the first replica, or under `fddp.join` of the first with data."""
    return _equal(lambda x: False)


def average() -> Buffers:
    """Averages floats, and broadcasts integers; under `fddp.join`, over the replicas with data."""
    return _equal(lambda x: jnp.issubdtype(x.dtype, jnp.inexact))


def _equal(averaged: Callable[[Array], bool]) -> Buffers:
    """Makes a rule for equal buffers: the mean where `averaged` holds, else a broadcast."""

    def send(comm: Communicator, model_state: PyTree, rows: PyTree) -> tuple[PyTree, PyTree]:
        if model_state is None:
            return None, None
        # One replica's buffers plus zeros of all others: the sum is the broadcast, and arrives
        # before the next forward pass.
        leads = None
        if isinstance(rows, Joined):
            leads = rows.leads
        if leads is None:
            is_source = comm.replica_index() == 0
            active = jnp.bool_(True)
        else:
            is_source = jnp.any(leads)
            active = jnp.any(jnp.asarray(rows.share) > 0)

        def part(x: Array) -> Array:
            if averaged(x):
                wide = _wide(x)
                return jnp.where(active, wide, jnp.zeros_like(wide))
            words = to_words(x)
            return jnp.where(is_source, words, jnp.zeros_like(words))

        parts = jax.tree.map(part, model_state)
        if leads is None:
            return (parts, None), None
        # The number of contributors is known only after the sum, and may be 0.
        contributes = is_source
        if any(map(averaged, jax.tree.leaves(model_state))):
            contributes = active
        return (parts, contributes.astype(jnp.float32)), None

    def land(comm: Communicator, old: PyTree, sums: PyTree, local: PyTree) -> PyTree:
        del local
        if sums is None:
            return None
        totals, count = sums
        divisor = comm.size
        if count is not None:
            divisor = jnp.maximum(count, 1)

        def landed(old: Array, total: Array) -> Array:
            if averaged(old):
                new = (total / divisor).astype(old.dtype)
            else:
                new = from_words(total, old)
            return new if count is None else jnp.where(count > 0, new, old)

        return jax.tree.map(landed, old, totals)

    return Buffers(send, land)


def _wide(x: Array) -> Array:
    """Widens floats to 32 bits: the sum of the replicas' buffers may overflow float16."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
