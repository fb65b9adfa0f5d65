"""The message that carries the scalars of a step: loss, metrics and buffers."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fddp.buckets.plan import Bucket, BucketPlan, Message


def place_scalars(
    plan: BucketPlan, dtype: DTypeLike = np.float32, *, early: bool = False, exact: bool = True
) -> BucketPlan:
    """Appends the scalars (loss, metrics, buffers) to the last bucket that holds `dtype` exactly.

    With `early` it is the first such bucket, as every update needs the summed weight. Without one,
    or if a hook rounds buckets or unused ones are skipped (`exact=False`), they get an all-reduce.

    >>> from fddp import make_plan
    >>> plan = make_plan({"w": np.zeros(3, "f4"), "b": np.zeros(3, "f4")}, bucket_cap_mb=0)
    >>> [message.scalars for message in plan.messages]
    [False, True]
    >>> [message.name for message in place_scalars(plan, exact=False).messages]
    ['bucket 0', 'bucket 1', 'tail']
    """
    bits = jnp.finfo(dtype).bits
    messages = list(map(Message, range(len(plan.buckets))))
    carriers = [k for k, bucket in enumerate(plan.buckets) if exact and _holds(bucket, bits)]
    if carriers:
        number = carriers[0] if early else carriers[-1]
        messages[number] = messages[number]._replace(scalars=True)
    else:
        messages.insert(0 if early else len(messages), Message(None, scalars=True))
    return replace(plan, messages=tuple(messages))


def _holds(bucket: Bucket, bits: int) -> bool:
    """True if floats of `bits` bits can be appended to a bucket."""
    floats = jnp.issubdtype(bucket.dtype, jnp.inexact) and jnp.finfo(bucket.dtype).bits >= bits
    return floats and bucket.rows is None and bucket.rounds == 1
