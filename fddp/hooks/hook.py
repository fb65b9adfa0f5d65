"""Communication hooks: pairs of pure functions that replace the plain sum of a bucket.

`apply` runs on every replica with the replica's bucket, and communicates through a `Communicator`.
The memory of a hook (a rounding error, a warm start) is stored for each leaf of the parameters, so
that it survives a new plan, and can be saved.

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
    """The bucket that a hook sums; named as in PyTorch."""

    buffer: Shaped[Array, " n"]
    """This replica's contributions, Σ w·g over its micro-batches, leaf after leaf."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each leaf."""
    number: int = 0
    """Index of the bucket in the plan (PyTorch's `index`)."""


class GradRows(NamedTuple):
    """The bucket that a hook scatters: row i holds the shards of replica i."""

    buffer: Shaped[Array, "replicas n"]
    """This replica's contributions."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each leaf."""
    rows_of: Callable[[Sequence[Array]], Shaped[Array, "replicas n"]]
    """Leaves → rows, in the layout of the buffer."""
    leaves_of: Callable[[Shaped[Array, "replicas n"]], list[Array]]
    """Rows → leaves: the inverse."""
    true: Bool[np.ndarray, "replicas n"]
    """Mask of the elements that are not padding."""
    number: int = 0
    """Index of the bucket in the plan (PyTorch's `index`)."""


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
    """Shape and dtype of a leaf → each replica's initial memory for it: a tree of arrays, () for
    none."""
    apply: Callable[[Communicator, GradBucket, State], tuple[Array, State]]
    """(comm, bucket, memory of its leaves) → (sum, new memory). The sum has the shape and dtype of
    the buffer, and is equal on all replicas. Every replica must call the collectives of `comm` in
    the same order."""
    name: str = "a hook of the user's own"
    """Name of the hook, equal on all ranks."""
    by_element: bool = False
    """True if it sums each element separately, without a memory. Slices of a leaf can then be sent
    one by one."""
    scatter: Callable[[Communicator, GradRows, State], tuple[Array, State]] | None = None
    """(comm, rows, memory of their leaves) → (this replica's row of the sum, new memory): the first
    half of `apply`, for a state in shards. None: `apply` is called, and each replica takes its
    shards of the sum."""
    bits: tuple[int, ...] = ()
    """Bits per number of each bucket, the last for all further buckets; () if the hook has no such
    option."""

    def __repr__(self) -> str:
        return f"Hook({self.name})"


def allreduce() -> Hook:
    """Sums buckets plainly (PyTorch's `allreduce_hook`)."""
    return Hook(
        nothing,
        lambda comm, bucket, memory: (comm.all_reduce(bucket.buffer), memory),
        "allreduce",
        by_element=True,
        scatter=lambda comm, rows, memory: (comm.reduce_scatter(rows.buffer), memory),
    )


def split_bucket(bucket: GradBucket) -> list[Array]:
    """Splits the buffer of a bucket into its leaves."""
    pieces = jax.lax.split(bucket.buffer, [math.prod(leaf.shape) for leaf in bucket.leaves])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, bucket.leaves)]


def nothing(leaf: jax.ShapeDtypeStruct) -> tuple[()]:
    """Initial memory of a hook without memory."""
    del leaf
    return ()


def check_hook(name: str, hook: Any) -> Hook:
    """Returns a hook unchanged, and raises TypeError for other values."""
    check_has("apply", name, hook, "a fddp.Hook, one of fddp.hooks")
    return hook
