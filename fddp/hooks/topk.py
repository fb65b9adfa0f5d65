"""A hook that sends only the largest numbers of a bucket, and remembers the rest."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, split
from fddp.hooks.narrow import is_float
from fddp.wording import check_number, check_switch


def topk(ratio: float = 0.01, *, error_feedback: bool = True) -> Hook:
    """Sends only each replica's largest numbers and their places (Aji and Heafield 2017; Stich et al. 2018).

    Args:
      ratio: share of a bucket's numbers that is sent, above 0 and up to 1.
      error_feedback: whether numbers that were not sent are added to the next step's gradients.

    Returns:
      The hook. Every replica gets all replicas' numbers, as they are: 8 (p − 1) bytes for each, 12 (p − 1) in float64,
      so ratio × p should be small.

    Raises:
      ValueError: ratio is out of its range.
    """
    check_switch("topk: error_feedback", error_feedback)
    check_number("topk: ratio", ratio)
    if not 0 < ratio <= 1:
        raise ValueError(f"topk: ratio must be above 0 and at most 1, got {ratio!r}.")

    def reduce(comm: Communicator, x: Float[Array, " n"]) -> tuple[Array, Array]:
        # Numbers that are not finite, NaN too, are sent before all others, or the other replicas would not see them.
        _, where = jax.lax.top_k(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), math.ceil(ratio * x.size))
        largest = x[where].astype(jnp.promote_types(x.dtype, jnp.float32))
        words = jax.lax.bitcast_convert_type(largest, jnp.int32)  # two words for a number of 64 bits
        gathered = comm.all_gather(jnp.concatenate([where.astype(jnp.int32), words.reshape(-1)]))
        places, everybodys = jnp.split(gathered, [where.size], axis=1)
        values = jax.lax.bitcast_convert_type(everybodys.reshape(-1, *words.shape[1:]), largest.dtype)

        def with_one(total: Array, of_replica: tuple[Array, Array]) -> tuple[Array, None]:
            # One replica after the other: a GPU adds equal places in any order, and replicas would drift apart.
            where, numbers = of_replica
            return total.at[where].add(numbers.astype(x.dtype), unique_indices=True), None

        total, _ = jax.lax.scan(with_one, jnp.zeros_like(x), (places, values.reshape(places.shape)))
        return total, jnp.zeros_like(x).at[where].set(x[where])

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if error_feedback and is_float(leaf.dtype) else ()

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        buffer = bucket.buffer
        if not is_float(buffer.dtype):
            return comm.all_reduce(buffer), state
        if not error_feedback:
            return reduce(comm, buffer)[0], state
        wanted = buffer + jnp.concatenate([left.reshape(-1) for left in state])
        total, sent = reduce(comm, wanted)
        return total, tuple(split(bucket._replace(buffer=wanted - sent)))

    return Hook(init, apply, f"topk({ratio}, error_feedback={error_feedback})")
