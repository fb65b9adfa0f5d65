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
from jaxtyping import Array, Bool, Shaped, UInt32

from fddp.buckets import BucketPlan, Message, flags
from fddp.comm import Communicator, all_reduce_bytes, as_uint32, count_bytes
from fddp.hooks.hook import GradBucket, Hook


class Asks(NamedTuple):
    """What came back before says whether a message is needed: whether it is not zero at one of these places."""

    message: int
    places: tuple[int, ...]


class Reduction(NamedTuple):
    """The sum of one message over replicas."""

    name: str = "tail"
    apply: Callable[[Communicator, Shaped[Array, " n"], Any], tuple[Array, Any]] | None = None
    """(comm, message, what is remembered for it) → (sum, what to remember); None: the plain sum, which a group may have
    a better way for between programs."""
    asks: Asks | None = None
    """Of which message it depends whether this one is sent; None: of none, it always is."""
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


def reductions(
    plan: BucketPlan, hook: Hook | None, mask: tuple[int, ...] | None, replicas: int = 1
) -> tuple[Reduction, ...]:
    """The sums of a step's messages.

    Args:
      plan: the buckets.
      hook: what is done with each bucket; None: the plain sum.
      mask: the leaves whose use the first message tells, so that buckets which nobody used are not sent; None: all are.
      replicas: how many there are, where some buckets travel as rows.

    Returns:
      One for each message in turn.
    """
    place = {leaf: at for at, leaf in enumerate(mask or ())}

    def of(number: int, message: Message) -> Reduction:
        if message.bucket is None:
            return PLAIN
        bucket = plan.buckets[message.bucket]
        first, more = bucket.names[0], f" and {len(bucket.names) - 1} more" if len(bucket.names) > 1 else ""
        one = Reduction(message.name, carries=f"{first}{more}")
        if message.rows:
            return one._replace(collective="all_gather", replicas=replicas)
        if bucket.rows:  # they went before, and tell whether something is left
            return one._replace(asks=Asks(number - 1, flags(bucket, replicas)))
        forms = tuple(jax.ShapeDtypeStruct(plan.leaves[i].shape, plan.leaves[i].dtype) for i in bucket.leaves)
        apply = None if hook is None else partial(_hooked, hook, forms)
        return one._replace(apply=apply, asks=None if mask is None else Asks(0, tuple(place[i] for i in bucket.leaves)))

    return tuple(of(number, message) for number, message in enumerate(plan.messages))


def summed(
    comm: Communicator,
    reduction: Reduction,
    said: Shaped[Array, " n"] | None,
    message: Shaped[Array, " n"],
    memory: Any,
) -> tuple[Shaped[Array, " n"], Any, UInt32[Array, ""]]:
    """Makes the sum inside a program.

    Args:
      comm: how the replicas talk.
      reduction: how.
      said: what came back of the message that the reduction asks, if it does.
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

    if reduction.asks is None or said is None:
        return send()
    return jax.lax.cond(
        jnp.any(said[np.asarray(reduction.asks.places)] != 0),
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
