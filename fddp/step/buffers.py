"""Buffers (a model state) of replicas that synchronize: broadcast, averaged, or each replica's own.

Each is a pair of functions: what of the buffers travels with the scalars, and what everybody has when it is back.

Source: `broadcast_buffers` and `_find_common_rank` in PyTorch's `distributed.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import from_words, to_words
from fddp.comm import Communicator, drop_replica_dim
from fddp.losses import Joined


class Buffers(NamedTuple):
    """A rule for buffers."""

    send: Callable[[Communicator, Any, Any], tuple[Any, Any]]
    """(comm, model_state, rows) → what travels, to be summed over replicas, and what each replica keeps."""
    land: Callable[[Communicator, Any, Any, Any], Any]
    """(comm, the model state before, the sums, what was kept) → the model state."""


def keep() -> Buffers:
    """Each replica keeps its own."""
    return Buffers(
        lambda comm, model_state, rows: (None, model_state), lambda comm, old, sums, kept: drop_replica_dim(kept)
    )


def broadcast() -> Buffers:
    """All get those of the first replica; under `fddp.join` of the first that still has data."""
    return _equal(lambda x: False)


def average() -> Buffers:
    """All get the mean of floats, and the first replica's integers; under `fddp.join` of those that still have data."""
    return _equal(lambda x: jnp.issubdtype(x.dtype, jnp.inexact))


def _equal(averaged: Callable[[Array], bool]) -> Buffers:
    def send(comm: Communicator, model_state: Any, rows: Any) -> tuple[Any, Any]:
        if model_state is None:
            return None, None
        # One replica's buffers plus everybody else's zeros: the sum is the broadcast, in time for the next forward.
        leads = rows.leads if isinstance(rows, Joined) else None
        mine = comm.replica_index() == 0 if leads is None else jnp.any(leads)
        active = jnp.bool_(True) if leads is None else jnp.any(jnp.asarray(rows.share) > 0)

        def part(x: Array) -> Array:
            sent, counts = (_wide(x), active) if averaged(x) else (to_words(x), mine)
            return jnp.where(counts, sent, jnp.zeros_like(sent))

        # With `join` it is known only then how many took part: perhaps nobody of this group.
        took_part = active if any(map(averaged, jax.tree.leaves(model_state))) else mine
        return (jax.tree.map(part, model_state), None if leads is None else took_part.astype(jnp.float32)), None

    def land(comm: Communicator, old: Any, sums: Any, kept: Any) -> Any:
        del kept
        if sums is None:
            return None
        totals, count = sums
        of = comm.size if count is None else jnp.maximum(count, 1)

        def landed(old: Array, total: Array) -> Array:
            new = (total / of).astype(old.dtype) if averaged(old) else from_words(total, old)
            return new if count is None else jnp.where(count > 0, new, old)

        return jax.tree.map(landed, old, totals)

    return Buffers(send, land)


def _wide(x: Array) -> Array:
    """A float in 32 bits at least: the sum of replicas' buffers may be more than float16 holds."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
