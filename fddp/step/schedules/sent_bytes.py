"""Counts the bytes that a replica sends, as numbers of 32 bits that saturate."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fddp.buckets import BucketPlan
from fddp.comm import MOST, as_uint32


def more_sent(sent: UInt32[Array, "*messages"], nbytes: Any) -> UInt32[Array, "*messages"]:
    """Adds to a number of bytes, and saturates at 32 bits.

    Example:
      >>> int(more_sent(jnp.uint32(7), 2**40)) == 2**32 - 1
      True
    """
    return sent + jnp.minimum(as_uint32(nbytes), jnp.uint32(MOST) - sent)


def by_bucket(plan: BucketPlan, sent: Array) -> Array:
    """Bytes of each bucket of a plan over all its messages, followed by those of the scalars."""
    numbers: dict[int, list[int]] = {}
    for number, message in enumerate(plan.messages):
        bucket = message.bucket
        if bucket is None:
            bucket = len(plan.buckets)
        numbers.setdefault(bucket, []).append(number)
    first, last = (np.array([numbers[b][end] for b in sorted(numbers)]) for end in (0, -1))
    more = jnp.where(first == last, 0, sent[last])
    return more_sent(sent[first], more)
