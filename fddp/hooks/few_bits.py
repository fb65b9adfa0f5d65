"""A hook that sends all numbers of a bucket in few bits, with error feedback.

Each replica receives one row of every replica's encoded numbers (all-to-all), adds them in float32,
and sends the sum to all replicas, encoded again (all-gather). The rounding error of a replica's
numbers is added to its next numbers, and the error of a sum to the next sum of that row.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019); the compressed all-reduce of
1-bit Adam (Tang et al., ICML 2021), section 5.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator, add_rows
from fddp.hooks import codes
from fddp.hooks.half_precision import padded_rows
from fddp.hooks.hook import GradBucket, Hook, State, flat_buffer, leaves_of_buffer, of_floats
from fddp.wording import check_switch, check_whole


def quantize(*, bits: int = 8, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends few bits per number, with scales (PyTorch's `quantization_pertensor_hook`).

    Numbers are integers, scaled by the largest number of a block.

    Args:
      bits: bits per number, 8 or 4; two numbers of 4 share a byte.
      block: count of numbers that share a scale.
      error_feedback: whether rounding errors are added to the next step's gradients and sums.
        Its memory has two arrays per leaf.

    Returns:
      The hook. It sends about a quarter, or an eighth, of the bytes.

    Raises:
      ValueError: bits is not 8 or 4, or block is not an integer of 1 or more, with 4 bits a
        multiple of 2.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean(x @ w)
      >>> hook = fddp.hooks.quantize(bits=4, block=8)
      >>> step = fddp.train_step(loss, optax.sgd(1.0), hook=hook)
      >>> state, info = step(step.init(jnp.zeros(4)), jnp.array([[7.0, -2.2, -1.0, 1.0]] * 8))
      >>> state.params.tolist()
      [-7.0, 2.0, 1.0, -1.0]
    """
    if bits not in (8, 4):
        raise ValueError(
            f"quantize: bits must be 8 or 4, got {bits!r}; fddp.hooks.bf16() sends 16."
        )
    check_whole("quantize: block", block, 1)
    if block * bits % 8:
        raise ValueError(
            f"quantize: block must be a multiple of 2, so that numbers fill bytes, got {block}."
        )
    check_switch("error_feedback", error_feedback)
    encode = partial(codes.encode, bits=bits, block=block)
    decode = partial(codes.decode, bits=bits, block=block)
    name = f"quantize(bits={bits}, block={block}, error_feedback={error_feedback})"

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not error_feedback:
            return ()
        return {kind: jnp.zeros(leaf.shape, leaf.dtype) for kind in ("sent", "summed")}

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        def joined(kind: str) -> Array:
            return flat_buffer([leaf[kind] for leaf in memory])

        buffer = bucket.buffer
        compensated = buffer + joined("sent") if error_feedback else buffer
        rows = padded_rows(compensated, comm.size, block)
        sum_errors = padded_rows(joined("summed"), comm.size, block) if error_feedback else None
        index = comm.replica_index()
        if sum_errors is not None:
            # Under an earlier plan this replica may have summed other rows. It sends their errors.
            rows = rows + jnp.where(jnp.arange(comm.size)[:, None] == index, 0, sum_errors)
        words = encode(rows)
        decoded = decode(words)
        row_sum = add_rows(decode(comm.all_to_all(words)))
        if sum_errors is not None:
            row_sum = row_sum + sum_errors[index]
        row_sum = jnp.where(
            index * row_sum.size + jnp.arange(row_sum.size) < buffer.size, row_sum, 0
        )
        answer = encode(row_sum)
        total = decode(comm.all_gather(answer)).reshape(-1)[: buffer.size].astype(buffer.dtype)
        if sum_errors is None:
            return total, memory
        row_errors = (
            jnp.zeros_like(rows).at[index].set((row_sum - decode(answer)).astype(rows.dtype))
        )
        errors = (rows - decoded).astype(rows.dtype), row_errors
        flat = [leaves_of_buffer(x.reshape(-1)[: buffer.size], bucket.leaves) for x in errors]
        return total, tuple({"sent": sent, "summed": summed} for sent, summed in zip(*flat))

    return of_floats(Hook(init, apply, name))
