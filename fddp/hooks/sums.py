"""How the sum of a message is made: plainly, through a hook, or not at all where no replica used what is in it.

Source: `register_comm_hook` and `skip_all_reduce_unused_params` in PyTorch; paper section 6.2.2 for layers that are
dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped, UInt32

from fddp.buckets import BucketPlan, Message
from fddp.comm import Communicator, all_reduce_bytes, as_uint32, count_bytes
from fddp.hooks.hook import GradBucket, Hook


class Reduction(NamedTuple):
    """The sum of one message over replicas."""

    name: str = "tail"
    apply: Callable[[Communicator, Shaped[Array, " n"], Any], tuple[Array, Any]] | None = None
    """(comm, message, what is remembered for it) → (sum, what to remember); None: the plain sum, which a group may have
    a better way for between programs."""
    leaves: tuple[int, ...] | None = None
    """Places in the mask, with which the first message then begins; it is sent if a replica used one of them. None:
    always."""
    carries: str = "loss and metrics"
    """What is in the message, for people."""
    collective: Literal["all_reduce", "reduce_scatter", "all_gather", "tree_reduce"] = "all_reduce"
    """What is done with it where nothing is to be applied: a sum, a part of the sum for each replica, no sum but all
    replicas' messages in a row, or the sum in the tree of virtual replicas."""
    replicas: int = 1
    """How many there are, where a part is made or parts are gathered."""
    blocks: int = 1
    """How many numbers of each replica are added for one of the sum, in the tree of virtual replicas."""

    @property
    def title(self) -> str:
        """Name and contents."""
        return f"{self.name} ({self.carries})" if self.carries else self.name

    def back(self, message: Any) -> jax.ShapeDtypeStruct:
        """The form of what comes back of a message of one replica."""
        parts = {"reduce_scatter": (1, self.replicas), "all_gather": (self.replicas, 1)}
        times, share = parts.get(self.collective, (1, self.blocks))
        return jax.ShapeDtypeStruct((message.shape[0] * times // share,), message.dtype)


PLAIN = Reduction()


def reductions(plan: BucketPlan, hook: Hook | None, mask: tuple[int, ...] | None) -> tuple[Reduction, ...]:
    """The sums of a step's messages.

    Args:
      plan: the buckets.
      hook: what is done with each bucket; None: the plain sum.
      mask: the leaves whose use the first message tells, so that buckets which nobody used are not sent; None: all are.

    Returns:
      One for each message in turn.
    """
    place = {leaf: at for at, leaf in enumerate(mask or ())}

    def of(message: Message) -> Reduction:
        if message.bucket is None:
            return PLAIN
        bucket = plan.buckets[message.bucket]
        forms = tuple(jax.ShapeDtypeStruct(plan.leaves[i].shape, plan.leaves[i].dtype) for i in bucket.leaves)
        apply = None if hook is None else partial(_hooked, hook, forms)
        leaves = None if mask is None else tuple(place[i] for i in bucket.leaves)
        first, more = bucket.names[0], f" and {len(bucket.names) - 1} more" if len(bucket.names) > 1 else ""
        return Reduction(message.name, apply, leaves, f"{first}{more}")

    return tuple(map(of, plan.messages))


def summed(
    comm: Communicator,
    reduction: Reduction,
    mask: Float[Array, " n"] | None,
    message: Shaped[Array, " n"],
    memory: Any,
) -> tuple[Shaped[Array, " n"], Any, UInt32[Array, ""]]:
    """Makes the sum inside a program.

    Args:
      comm: how the replicas talk.
      reduction: how.
      mask: how many replicas used each leaf, and more behind it, where the reduction asks.
      message: this replica's part.
      memory: what it remembers for this message.

    Returns:
      The sum, what to remember, and the bytes that each replica sent (at most 2³² − 1 are told).
    """
    plain = {
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "reduce_scatter": lambda comm, x: comm.reduce_scatter(x.reshape(comm.size, -1)),
        "all_gather": lambda comm, x: comm.all_gather(x).reshape(-1),
    }[reduction.collective]
    apply = reduction.apply or (lambda comm, message, memory: (plain(comm, message), memory))

    def send() -> tuple[Array, Any, Array]:
        (total, new), sent = count_bytes(comm, apply, message, memory)
        return total, new, as_uint32(sent)

    if reduction.leaves is None or mask is None:
        return send()
    return jax.lax.cond(
        jnp.any(mask[np.asarray(reduction.leaves)] > 0),
        send,
        lambda: (jnp.zeros_like(message), memory, jnp.uint32(0)),
    )


def plain_bytes(comm: Communicator, reduction: Reduction, size: int, dtype: Any) -> int:
    """What each replica sends where nothing is applied to a message of so many numbers."""
    if reduction.collective == "all_gather":
        return (comm.size - 1) * size * jnp.dtype(dtype).itemsize
    if reduction.collective == "tree_reduce":
        part = -(-size // (reduction.blocks * comm.size))
        return (comm.size - 1) * part * (reduction.blocks + 1) * jnp.dtype(dtype).itemsize
    halves = 2 if reduction.collective == "all_reduce" else 1
    return -(-halves * all_reduce_bytes(comm, size, dtype) // 2)


def all_finite(total: Shaped[Array, " n"]) -> Bool[Array, ""]:
    """Whether a sum is finite: the same on all replicas, as the sum is."""
    return jnp.all(jnp.isfinite(total))


def _hooked(hook: Hook, forms: Any, comm: Communicator, message: Shaped[Array, " n"], memory: Any) -> tuple[Array, Any]:
    return hook.apply(comm, GradBucket(message, forms), memory)
