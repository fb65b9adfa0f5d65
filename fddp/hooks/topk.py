"""A hook that sends only the largest numbers of a bucket."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fddp.comm import Communicator
from fddp.hooks.hook import GradBucket, Hook, State, flat_buffer, leaves_of_buffer, of_floats
from fddp.wording import check_range, check_switch


def topk(ratio: float = 0.01, *, error_feedback: bool = True) -> Hook:
    """Sends each replica's largest numbers and places (Aji, Heafield 2017; Stich et al. 2018).

    Args:
      ratio: share of a bucket's numbers that is sent, above 0 and up to 1.
      error_feedback: whether unsent numbers are added to the next step's gradients.

    Returns:
      The hook. It gathers the numbers of all p replicas: 8 (p − 1) bytes per number, 12 (p − 1) in
      float64. So ratio × p should be small.

    Raises:
      ValueError: ratio is out of its range.
    """
    check_switch("topk: error_feedback", error_feedback)
    ratio = check_range("topk: ratio", ratio, "above 0 and at most 1", lambda x: 0 < x <= 1)

    def reduce(comm: Communicator, x: Float[Array, " n"]) -> tuple[Array, Array]:
        # Numbers that are not finite rank first, or other replicas would not see them.
        _, local_places = jax.lax.top_k(
            jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), math.ceil(ratio * x.size)
        )
        largest = x[local_places].astype(jnp.promote_types(x.dtype, jnp.float32))
        # Two words for a number of 64 bits.
        words = jax.lax.bitcast_convert_type(largest, jnp.int32)
        gathered = comm.all_gather(
            jnp.concatenate([local_places.astype(jnp.int32), words.reshape(-1)])
        )
        places, all_words = jnp.split(gathered, [local_places.size], axis=1)
        values = jax.lax.bitcast_convert_type(
            all_words.reshape(-1, *words.shape[1:]), largest.dtype
        )

        def add_replica(total: Array, message: tuple[Array, Array]) -> tuple[Array, None]:
            # Replica by replica: a GPU adds equal places in any order, and replicas would diverge.
            replica_places, numbers = message
            return total.at[replica_places].add(numbers.astype(x.dtype), unique_indices=True), None

        total, _ = jax.lax.scan(
            add_replica, jnp.zeros_like(x), (places, values.reshape(places.shape))
        )
        return total, jnp.zeros_like(x).at[local_places].set(x[local_places])

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if error_feedback else ()

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        buffer = bucket.buffer
        if not error_feedback:
            return reduce(comm, buffer)[0], memory
        compensated = buffer + flat_buffer(memory)
        total, payload = reduce(comm, compensated)
        return total, tuple(leaves_of_buffer(compensated - payload, bucket.leaves))

    return of_floats(Hook(init, apply, f"topk({ratio}, error_feedback={error_feedback})"))
