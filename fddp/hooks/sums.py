"""How the sum of a message is made: plainly, through a hook, or not at all where no replica used what is in it.

Source: `register_comm_hook` and `skip_all_reduce_unused_params` in PyTorch; paper section 6.2.2 for layers that are
dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped, UInt32

from fddp.buckets import BucketPlan, Message
from fddp.comm import Communicator, as_uint32, count_bytes
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

    @property
    def title(self) -> str:
        """Name and contents."""
        return f"{self.name} ({self.carries})" if self.carries else self.name


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
    apply = reduction.apply or (lambda comm, message, memory: (comm.all_reduce(message), memory))

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


def all_finite(total: Shaped[Array, " n"]) -> Bool[Array, ""]:
    """Whether a sum is finite: the same on all replicas, as the sum is."""
    return jnp.all(jnp.isfinite(total))


def _hooked(hook: Hook, forms: Any, comm: Communicator, message: Shaped[Array, " n"], memory: Any) -> tuple[Array, Any]:
    return hook.apply(comm, GradBucket(message, forms), memory)
