"""Communication hooks: pairs of pure functions that replace the plain sum of a bucket.

`apply` runs on every replica with the replica's bucket, and communicates through a `Communicator`.
The memory of a hook (a rounding error, a warm start) is stored for each leaf of the parameters, so
that it survives a new plan, and can be saved.

Source: `register_comm_hook` and `GradBucket` in PyTorch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from fddp.comm import Communicator
from fddp.wording import check_has

State = tuple[Any, ...]


class GradBucket(NamedTuple):
    """The bucket that a hook sums; named as in PyTorch."""

    buffer: Shaped[Array, "*dims"]
    """This replica's contributions, Σ w·g over its micro-batches: one dim, leaf after leaf. With
    `shard=` two dims: row i holds the shards of replica i, which may end with padding."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each leaf."""


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
    the buffer, and is equal on all replicas; of two dims it may also be this replica's row. Every
    replica must call the collectives of `comm` in the same order."""
    name: str = "a hook of the user's own"
    """Name of the hook, equal on all ranks."""
    by_element: bool = False
    """True if it sums each element separately, without a memory: shards of leaves (`shard=`) can
    then be sent."""

    def __repr__(self) -> str:
        return f"Hook({self.name})"


def allreduce() -> Hook:
    """Sums buckets plainly (PyTorch's `allreduce_hook`)."""
    return Hook(nothing, _plain, "allreduce", by_element=True)


def of_floats(hook: Hook) -> Hook:
    """Uses a hook for floats; integers and complex numbers are summed plainly, without memory."""

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return hook.init(leaf) if is_float(leaf.dtype) else ()

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        reduce = hook.apply if is_float(bucket.buffer.dtype) else _plain
        return reduce(comm, bucket, memory)

    return hook._replace(init=init, apply=apply)


def is_float(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def flat_buffer(leaves: Iterable[Array]) -> Shaped[Array, " n"]:
    """Joins leaves into a flat buffer."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def leaves_of_buffer(
    buffer: Shaped[Array, " n"], leaves: Sequence[Array | jax.ShapeDtypeStruct]
) -> list[Array]:
    """Splits a flat buffer into arrays with the shapes of `leaves`."""
    pieces = jax.lax.split(buffer, [math.prod(leaf.shape) for leaf in leaves])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves)]


def nothing(leaf: jax.ShapeDtypeStruct) -> tuple[()]:
    """Initial memory of a hook without memory."""
    del leaf
    return ()


def check_hook(name: str, hook: Any) -> None:
    """Raises TypeError for a value that is not a hook."""
    check_has("apply", name, hook, "a fddp.Hook, one of fddp.hooks")


def _plain(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
    if bucket.buffer.ndim == 2:
        return comm.reduce_scatter(bucket.buffer), memory
    return comm.all_reduce(bucket.buffer), memory
