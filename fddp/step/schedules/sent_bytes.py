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
    """Bytes of each bucket of a plan, followed by those of a separate message of the scalars."""
    buckets = [message.bucket for message in plan.messages]
    return sent[np.argsort([len(buckets) if bucket is None else bucket for bucket in buckets])]
