"""What a communication hook is: what is done with a bucket in place of the plain sum over replicas.

A `Hook` is a pair of pure functions. `apply` runs on every replica, with that replica's own bucket, and talks to the
others through a `Communicator`; what it wants to remember until the next step (a rounding error, a warm start) it keeps
for each leaf of the parameters, so that it outlives a new plan and can be saved.

Source: `register_comm_hook` and `GradBucket` in PyTorch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Shaped

from fddp.comm import Communicator

State = tuple[Any, ...]


class GradBucket(NamedTuple):
    """A bucket as a hook gets it; named as in PyTorch."""

    buffer: Shaped[Array, " n"]
    """This replica's contributions, Σ w·g over its micro-batches, leaf after leaf."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """The form of each leaf in it."""


class Hook(NamedTuple):
    """How a bucket is summed over replicas.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean((x - w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.25), hook=fddp.hooks.bf16())
      >>> state, info = step(step.init(jnp.zeros(())), jnp.full(8, 2.0))
      >>> float(state.params)
      1.0
    """

    init: Callable[[jax.ShapeDtypeStruct], Any]
    """A leaf's form → what each replica remembers for it at first: a tree of arrays, () for nothing."""
    apply: Callable[[Communicator, GradBucket, State], tuple[Array, State]]
    """(comm, bucket, what is remembered for its leaves) → the sum over replicas, like the buffer and equal on all of
    them, and what to remember now. It must call the comm's collectives in the same order on every replica."""
    name: str = "a hook of the user's own"
    """Compared between ranks."""

    def __repr__(self) -> str:
        return f"Hook({self.name})"


def allreduce() -> Hook:
    """The plain sum (PyTorch's `allreduce_hook`)."""
    return Hook(nothing, lambda comm, bucket, state: (comm.all_reduce(bucket.buffer), state), "allreduce")


def split(bucket: GradBucket) -> list[Array]:
    """The leaves in a bucket's buffer."""
    pieces = jax.lax.split(bucket.buffer, [math.prod(leaf.shape) for leaf in bucket.leaves])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, bucket.leaves)]


def nothing(leaf: jax.ShapeDtypeStruct) -> tuple[()]:
    """What a hook without a memory begins with."""
    del leaf
    return ()
