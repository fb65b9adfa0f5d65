"""Sums a message over replicas: plainly, through a hook, or not at all where no replica used the leaves in it.

Source: `register_comm_hook` and `skip_all_reduce_unused_params` in PyTorch; paper section 6.2.2 for layers that are
dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Shaped, UInt32

from fddp.buckets import BucketPlan, Message, by_device, flags
from fddp.comm import (
    Communicator,
    Level,
    Placement,
    add_bytes,
    all_reduce_bytes,
    as_uint32,
    count_aside,
    count_bytes,
    reduce_scatter_bytes,
)
from fddp.hooks.hook import GradBucket, Hook


class Asks(NamedTuple):
    """The condition on which a message is sent: the sum of an earlier message is not zero at one of these places."""

    message: int
    """Number of the earlier message."""
    places: tuple[int, ...]
    """Places in its sum."""


class Reduction(NamedTuple):
    """The sum of one message over replicas."""

    name: str = "tail"
    apply: Callable[[Communicator, Shaped[Array, " n"], Any], tuple[Array, Any]] | None = None
    """(comm, message, memory) → (sum, new memory); None: the plain sum, which a group may make in a better way between
    programs."""
    memory: int | None = None
    """The place in `Memory` of all that its hook remembers; None: the sum is plain. Messages with one place take turns,
    each with the memory that the one before it left."""
    bucket: int | None = None
    """Number of the bucket in it; None: none."""
    asks: Asks | None = None
    """The message that decides whether this one is sent; None: it always is."""
    carries: str = "loss and metrics"
    """The contents of the message, for people."""
    collective: Literal["all_reduce", "reduce_scatter", "all_gather", "tree_reduce"] = "all_reduce"
    """The collective where `apply` is None: a sum, a part of the sum for each replica, no sum but all replicas'
    messages in a row, or the sum in the tree of virtual replicas."""
    level: Level = "all"
    """The replicas that it is for."""
    replicas: int = 1
    """Number of replicas, where the sum is scattered or messages are gathered."""
    blocks: int = 1
    """Number of blocks of each replica that are added in the tree of virtual replicas."""
    rounds: int = 1
    """Number of equal parts of the message that one program sums one by one, as a loop makes them in its rounds."""

    @property
    def among_some(self) -> bool:
        """Whether some replicas speak among themselves, so that others have something else when it is back."""
        return self.level in ("node", "network", "neighbours")

    @property
    def title(self) -> str:
        """Name and contents."""
        return f"{self.name} ({self.carries})" if self.carries else self.name

    def back(self, message: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the collective's result for one replica's message."""
        parts = {"reduce_scatter": (1, self.replicas), "all_gather": (self.replicas, 1)}
        times, share = parts.get(self.collective, (1, self.blocks))
        return jax.ShapeDtypeStruct((message.shape[0] * times // share,), message.dtype)


PLAIN = Reduction()

# What each collective does with a message.
COLLECTIVES: dict[str, Callable[[Communicator, Array], Array]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x.reshape(comm.size, -1)),
    "all_gather": lambda comm, x: comm.all_gather(x).reshape(-1),
}


def reductions(
    plan: BucketPlan, hook: Hook | None, mask: tuple[int, ...] | None, replicas: int = 1
) -> tuple[Reduction, ...]:
    """Makes the reductions of a step's messages.

    Args:
      plan: the plan of the buckets.
      hook: the hook that sums each bucket; None: the plain sum.
      mask: the leaves whose use is in the sum of the first message, so that buckets which no replica used are not sent;
        None: all buckets are sent.
      replicas: number of replicas, where some buckets travel as rows.

    Returns:
      A reduction for each message in turn.
    """
    place = {leaf: at for at, leaf in enumerate(mask or ())}

    def of(number: int, message: Message) -> Reduction:
        if message.bucket is None:
            return PLAIN
        bucket = plan.buckets[message.bucket]
        first = bucket.names[0]
        more = f" and {len(bucket.names) - 1} more" if len(bucket.names) > 1 else ""
        one = Reduction(message.name, bucket=message.bucket, carries=f"{first}{more}", rounds=bucket.rounds)
        if message.rows:
            return one._replace(collective="all_gather", replicas=replicas)
        if bucket.rows:  # the message before this one had its rows, and says whether any are left
            return one._replace(asks=Asks(number - 1, flags(bucket, replicas)))
        forms = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.travelling(bucket))
        asks = None if mask is None else Asks(0, tuple(place[i] for i in bucket.leaves))
        hooked = {} if hook is None else {"apply": partial(_hooked, hook, forms, message.bucket), "memory": number}
        return one._replace(asks=asks, **hooked)

    return tuple(of(number, message) for number, message in enumerate(plan.messages))


def on_each_device(placement: Placement, reduction: Reduction) -> Reduction:
    """Makes the reduction of a message of which each device of a replica has its own, behind that of the one before.

    Args:
      placement: the devices.
      reduction: of one device's message.

    Returns:
      The reduction.
    """
    axes = placement.other_axes
    if not axes:
        return reduction
    plain = COLLECTIVES[reduction.collective]
    one = reduction.apply or (lambda comm, message, memory: (plain(comm, message), memory))

    def each(comm: Communicator, message: Array, memory: Any) -> Array:
        own = PartitionSpec(axes)
        return by_device(axes, lambda x: one(comm, x, memory)[0], own, own)(message)

    def apply(comm: Communicator, message: Array, memory: Any) -> tuple[Array, Any]:
        total, sent = count_aside(comm, each, message, memory)
        add_bytes(comm, placement.devices_of_replica * sent)
        return total, memory

    return reduction._replace(apply=apply)


def summed(
    comm: Communicator,
    reduction: Reduction,
    said: Shaped[Array, " n"] | None,
    message: Shaped[Array, " n"],
    memory: Any,
) -> tuple[Shaped[Array, " n"], Any, UInt32[Array, ""]]:
    """Sums one message over replicas, inside a program.

    Args:
      comm: the replicas' communicator.
      reduction: the message's reduction.
      said: the sum of the message that decides whether this one is sent; None: it is sent.
      message: this replica's summand.
      memory: the hook's memory for this message.

    Returns:
      The sum, the new memory, and the bytes that each replica sent (2³² − 1 stands for more).
    """
    plain = COLLECTIVES[reduction.collective]
    each = plain if reduction.rounds == 1 else partial(_round_by_round, plain, reduction.rounds)
    apply = reduction.apply or (lambda comm, message, memory: (each(comm, message), memory))

    def send() -> tuple[Array, Any, Array]:
        (total, new), sent = count_bytes(comm.at(reduction.level), apply, message, memory)
        return total, new, as_uint32(reduction.rounds * sent)

    if reduction.asks is None or said is None:
        return send()
    return jax.lax.cond(
        jnp.any(said[np.asarray(reduction.asks.places)] != 0),
        send,
        lambda: (jnp.zeros_like(message), memory, jnp.uint32(0)),
    )


def _round_by_round(plain: Any, rounds: int, comm: Communicator, message: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    """Sums the parts of a message in a loop, which `fused_loops` puts into the loop that makes them."""
    return jax.lax.map(partial(plain, comm), message.reshape(rounds, -1)).reshape(-1)


def plain_bytes(comm: Communicator, reduction: Reduction, size: int, dtype: Any) -> int:
    """Bytes that each replica sends for a message of `size` numbers where `apply` is None."""
    comm = comm.at(reduction.level)
    if reduction.collective == "all_gather":
        return (comm.size - 1) * size * jnp.dtype(dtype).itemsize
    if reduction.collective == "tree_reduce":
        part = -(-size // (reduction.blocks * comm.size))
        return (comm.size - 1) * part * (reduction.blocks + 1) * jnp.dtype(dtype).itemsize
    nbytes = all_reduce_bytes if reduction.collective == "all_reduce" else reduce_scatter_bytes
    return nbytes(comm, size, dtype)


def all_finite(total: Shaped[Array, " n"]) -> Bool[Array, ""]:
    """Whether a sum is finite; all replicas get the same answer, as they have the same sum."""
    return jnp.all(jnp.isfinite(total))


def _hooked(
    hook: Hook, forms: Any, index: int, comm: Communicator, message: Shaped[Array, " n"], memory: Any
) -> tuple[Array, Any]:
    return hook.apply(comm, GradBucket(message, forms, index), memory)
