"""The type of communication hooks, which sum a bucket over replicas in place of the plain sum.

A `Hook` is a pair of pure functions. `apply` runs on every replica, with that replica's own bucket, and talks to the
others through a `Communicator`. Its memory until the next step (a rounding error, a warm start) is kept for each leaf
of the parameters, so that it outlives a new plan and can be saved.

Source: `register_comm_hook` and `GradBucket` in PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Shaped

from fddp.comm import Communicator
from fddp.wording import check_has

State = tuple[Any, ...]


class GradBucket(NamedTuple):
    """A bucket as a hook gets it; named as in PyTorch."""

    buffer: Shaped[Array, " n"]
    """This replica's contributions, Σ w·g over its micro-batches, leaf after leaf."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each leaf in it."""
    number: int = 0
    """Its place in the plan (PyTorch's `index`)."""


class GradRows(NamedTuple):
    """A bucket that is scattered: row i is for replica i, which has that part of each leaf."""

    buffer: Shaped[Array, "replicas n"]
    """This replica's contributions."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each leaf in it."""
    rows_of: Callable[[Sequence[Array]], Shaped[Array, "replicas n"]]
    """Leaves → rows that have them where the buffer has them."""
    leaves_of: Callable[[Shaped[Array, "replicas n"]], list[Array]]
    """Rows → leaves: the inverse."""
    true: Bool[np.ndarray, "replicas n"]
    """Marks the numbers of leaves; the others are padding."""
    number: int = 0
    """Its place in the plan (PyTorch's `index`)."""


class Hook(NamedTuple):
    """A pair of functions that sums a bucket over replicas.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean((x - w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.25), hook=fddp.hooks.bf16())
      >>> state, info = step(step.init(jnp.zeros(())), jnp.full(8, 2.0))
      >>> float(state.params)
      1.0
    """

    init: Callable[[jax.ShapeDtypeStruct], Any]
    """A leaf's shape and dtype → each replica's first memory for it: a tree of arrays, () for nothing."""
    apply: Callable[[Communicator, GradBucket, State], tuple[Array, State]]
    """(comm, bucket, memory of its leaves) → (sum, new memory). The sum is like the buffer, and equal on all replicas.
    The function must call the comm's collectives in the same order on every replica."""
    name: str = "a hook of the user's own"
    """The name, which must be equal on all ranks."""
    by_element: bool = False
    """Whether it sums each element by itself, without a memory: then slices of a leaf may travel one by one."""
    scatter: Callable[[Communicator, GradRows, State], tuple[Array, State]] | None = None
    """(comm, rows, memory of their leaves) → (this replica's row of the sum, new memory): half of what `apply` does,
    for a state in shards, where nobody needs all of a sum. None: each replica takes its part of what `apply` makes."""
    bits: tuple[int, ...] = ()
    """The bits of a number in each bucket in turn, the last ones for all that follow, where it is given them."""

    def __repr__(self) -> str:
        return f"Hook({self.name})"


def allreduce() -> Hook:
    """Sums buckets plainly (PyTorch's `allreduce_hook`)."""
    return Hook(
        nothing,
        lambda comm, bucket, state: (comm.all_reduce(bucket.buffer), state),
        "allreduce",
        by_element=True,
        scatter=lambda comm, rows, state: (comm.reduce_scatter(rows.buffer), state),
    )


def split(bucket: GradBucket) -> list[Array]:
    """Splits a bucket's buffer into its leaves."""
    pieces = jax.lax.split(bucket.buffer, [math.prod(leaf.shape) for leaf in bucket.leaves])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, bucket.leaves)]


def nothing(leaf: jax.ShapeDtypeStruct) -> tuple[()]:
    """The first memory of a hook that has none."""
    del leaf
    return ()


def check_hook(name: str, hook: Any) -> Hook:
    """Returns a hook as it is, and refuses all else."""
    check_has("apply", name, hook, "a fddp.Hook, one of fddp.hooks")
    return hook
