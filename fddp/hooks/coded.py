"""Hooks that send all numbers of a bucket in a code of few bits, with error feedback.

Each replica receives one row of every replica's encoded numbers (all-to-all), adds them in float32,
and sends the sum to all replicas, encoded again (all-gather). With parameters in shards the first
half suffices: the sum of a row stays on its replica, unencoded. The rounding error of a replica's
numbers is added to its next numbers, and the error of a sum to the next sum of that row.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al.,
"Error Feedback Fixes SignSGD" (ICML 2019); the compressed all-reduce of 1-bit Adam (Tang et al.,
ICML 2021), section 5.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fddp.comm import Communicator, add_rows
from fddp.hooks.codes import Code, integers, signs
from fddp.hooks.hook import (
    GradBucket,
    GradRows,
    Hook,
    State,
    join_memory,
    of_floats,
    split_memory,
)
from fddp.hooks.narrow import padded_rows
from fddp.wording import check_switch, check_whole


def quantize(*, bits: int = 8, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends integers of 8 or 4 bits, with scales (PyTorch's `quantization_pertensor_hook`).

    Args:
      bits: bits per number; two numbers of 4 bits share a byte.
      block: count of numbers that share a scale.
      error_feedback: whether rounding errors are added to the next step's gradients and sums.

    Returns:
      The hook. It sends about a quarter, or an eighth, of the bytes.

    Raises:
      ValueError: bits is neither 8 nor 4, or block is not an integer of 1 or more (with 4 bits an
        even one).
    """
    if bits not in (8, 4):
        raise ValueError(
            f"quantize: bits must be 8 or 4, got {bits!r}; "
            "fddp.hooks.sign() sends 1 bit, bf16() 16."
        )
    _check_block("quantize", block, 8 // bits)
    name = f"quantize(bits={bits}, block={block}, error_feedback={error_feedback})"
    return coded(integers(bits, block), name, error_feedback=error_feedback)


def sign(*, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends signs, and the mean absolute value of each block of numbers (1-bit SGD; signSGD).

    Signs lose most of a gradient, and error feedback adds it later in large pieces. So begin with
    plain sums (`fddp.hooks.starting`), and use a smaller learning rate.

    Args:
      block: count of numbers that share a mean, a multiple of 8.
      error_feedback: whether the errors are added to the next step's gradients and sums; without it
        sums are biased.

    Returns:
      The hook. It sends about a thirtieth of the bytes.

    Raises:
      ValueError: block is not a multiple of 8.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean(x @ w)
      >>> step = fddp.train_step(loss, optax.sgd(1.0), hook=fddp.hooks.sign(block=8))
      >>> state, info = step(step.init(jnp.zeros(4)), jnp.array([[4.0, -2.0, -1.0, 1.0]] * 8))
      >>> state.params.tolist()
      [-2.0, 2.0, 2.0, -2.0]
    """
    _check_block("sign", block, 8)
    name = f"sign(block={block}, error_feedback={error_feedback})"
    return coded(signs(block), name, error_feedback=error_feedback)


def coded(code: Code, name: str, *, error_feedback: bool) -> Hook:
    """Returns a hook that sends floats in a code.

    With error feedback its memory holds, for each leaf, the errors of this replica's numbers
    ("sent"), and of the sums of its row ("summed").
    """
    check_switch("error_feedback", error_feedback)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not error_feedback:
            return ()
        return {kind: jnp.zeros(leaf.shape, leaf.dtype) for kind in ("sent", "summed")}

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        buffer = compensated = bucket.buffer
        if error_feedback:
            compensated = buffer + join_memory(memory, "sent")
        rows = padded_rows(compensated, comm.size, code.block)
        sum_errors = None
        if error_feedback:
            sum_errors = padded_rows(join_memory(memory, "summed"), comm.size, code.block)
        begins = np.arange(0, rows.size, code.block)
        counts = np.clip(buffer.size - begins, 0, code.block).reshape(comm.size, -1)
        index = comm.replica_index()
        if sum_errors is not None:
            # This replica may have summed other rows under another plan, or with other bits. It
            # sends the errors of those sums.
            rows = rows + jnp.where(jnp.arange(comm.size)[:, None] == index, 0, sum_errors)
        row_sum, decoded = _scattered(comm, code, rows, counts)
        if sum_errors is not None:
            row_sum = row_sum + sum_errors[index]
        row_sum = jnp.where(
            index * row_sum.size + jnp.arange(row_sum.size) < buffer.size, row_sum, 0
        )
        words = code.encode(row_sum, jnp.asarray(counts)[index])
        total = code.decode(comm.all_gather(words)).reshape(-1)[: buffer.size].astype(buffer.dtype)
        if sum_errors is None:
            return total, memory
        row_errors = (
            jnp.zeros_like(rows).at[index].set((row_sum - code.decode(words)).astype(rows.dtype))
        )
        errors = (rows - decoded).astype(rows.dtype), row_errors
        flat = (x.reshape(-1)[: buffer.size] for x in errors)
        return total, split_memory(bucket.leaves, ("sent", "summed"), flat)

    def scatter(comm: Communicator, bucket: GradRows, memory: State) -> tuple[Array, State]:
        rows = bucket.buffer
        if error_feedback:
            rows = rows + bucket.rows_of([leaf["sent"] for leaf in memory])
        width = rows.shape[1]
        padding = ((0, 0), (0, -width % code.block))
        counts = np.pad(bucket.true, padding).reshape(comm.size, -1, code.block).sum(-1)
        row_sum, decoded = _scattered(comm, code, jnp.pad(rows, padding), counts)
        row_sum = row_sum[:width].astype(rows.dtype)
        if not error_feedback:
            return row_sum, memory
        errors = bucket.leaves_of((rows - decoded[:, :width]).astype(rows.dtype))
        return row_sum, tuple(leaf | {"sent": x} for leaf, x in zip(memory, errors))

    return of_floats(Hook(init, apply, name, scatter=scatter))


def _scattered(
    comm: Communicator,
    code: Code,
    rows: Float[Array, "replicas m"],
    counts: Int[np.ndarray, "replicas n"],
) -> tuple[Float[Array, " m"], Float[Array, "replicas m"]]:
    """Reduce-scatters encoded rows; returns this replica's sum, and its decoded rows."""
    words = code.encode(rows, counts)
    return add_rows(code.decode(comm.all_to_all(words))), code.decode(words)


def _check_block(hook: str, block: int, per_byte: int) -> None:
    check_whole(f"{hook}: block", block, 1)
    if block % per_byte:
        raise ValueError(
            f"{hook}: block must be a multiple of {per_byte}, so that numbers fill bytes, "
            f"got {block!r}."
        )
