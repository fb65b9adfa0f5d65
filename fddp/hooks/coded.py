"""Hooks that send all numbers of a bucket in a code of few bits, and remember what it loses.

Each replica gets one row of everybody's numbers in code (all-to-all), adds them up in float32, and sends the sum to
all, in code again (all-gather). Where parameters lie in shards the first half is all that is needed: the sum of a row
stays with its replica as it is. What the code loses of a replica's numbers is added to its next numbers, and what it
loses of a sum to the next sum of that row.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error Feedback Fixes
SignSGD" (ICML 2019); the compressed all-reduce of 1-bit Adam (Tang et al., ICML 2021), section 5.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fddp.comm import Communicator, added
from fddp.hooks.codes import Code, integers, signs
from fddp.hooks.hook import GradBucket, GradRows, Hook, State, split
from fddp.hooks.narrow import as_rows, is_float
from fddp.wording import check_switch, check_whole


def quantize(*, bits: int = 8, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends integers of 8 or 4 bits, each block of numbers with a scale (PyTorch's `quantization_pertensor_hook`).

    Args:
      bits: of each number; two numbers of 4 bits travel in a byte.
      block: count of numbers that share a scale.
      error_feedback: whether rounding errors are added to the next step's gradients and sums.

    Returns:
      The hook. It sends about a quarter, or an eighth, of the bytes.

    Raises:
      ValueError: bits is neither 8 nor 4, or block is no whole number of 1 or more (of 4 bits an even one).
    """
    if bits not in (8, 4):
        raise ValueError(f"quantize: bits must be 8 or 4, got {bits!r}; fddp.hooks.sign() sends 1 bit, bf16() 16.")
    _check_block("quantize", block, 8 // bits)
    name = f"quantize(bits={bits}, block={block}, error_feedback={error_feedback})"
    return coded(integers(bits, block), name, error_feedback=error_feedback)


def sign(*, block: int = 256, error_feedback: bool = True) -> Hook:
    """Sends one bit a number, its sign, and for each block of numbers their mean size (1-bit SGD; signSGD).

    Signs alone lose most of a gradient, and the error comes later in large pieces: give it time with
    `fddp.hooks.starting`, and a smaller learning rate than plain sums.

    Args:
      block: count of numbers that share a mean size, a multiple of 8.
      error_feedback: whether what signs lose is added to the next step's gradients and sums; without it the sum keeps
        its bias.

    Returns:
      The hook. It sends about a thirtieth of the bytes.

    Raises:
      ValueError: block is no multiple of 8.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean(x @ w)
      >>> step = fddp.train_step(loss, optax.sgd(1.0), hook=fddp.hooks.sign(block=8))
      >>> state, info = step(step.init(jnp.zeros(4)), jnp.array([[4.0, -2.0, -1.0, 1.0]] * 8))
      >>> state.params.tolist()
      [-2.0, 2.0, 2.0, -2.0]
    """
    _check_block("sign", block, 8)
    return coded(signs(block), f"sign(block={block}, error_feedback={error_feedback})", error_feedback=error_feedback)


def coded(code: Code, name: str, *, error_feedback: bool) -> Hook:
    """Makes a hook that sends numbers in a code; integers and complex numbers are summed as they are.

    Args:
      code: writes the numbers.
      name: the hook's name.
      error_feedback: whether it remembers what the code loses: of a leaf "sent", of this replica's numbers, and
        "summed", of the sums of its own row.

    Returns:
      The hook.
    """
    check_switch("error_feedback", error_feedback)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not (error_feedback and is_float(leaf.dtype)):
            return ()
        return {kind: jnp.zeros(leaf.shape, leaf.dtype) for kind in ("sent", "summed")}

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        buffer = bucket.buffer
        if not is_float(buffer.dtype):
            return comm.all_reduce(buffer), state
        rows = as_rows(buffer + _flat(state, "sent") if error_feedback else buffer, comm.size, code.block)
        before = as_rows(_flat(state, "summed"), comm.size, code.block) if error_feedback else None
        begins = np.arange(0, rows.size, code.block)
        counts = np.clip(buffer.size - begins, 0, code.block).reshape(comm.size, -1)
        index = comm.replica_index()
        if before is not None:
            # What is left of sums of rows that were this replica's under another plan, or with other bits.
            rows = rows + jnp.where(jnp.arange(comm.size)[:, None] == index, 0, before)
        part, stood = _scattered(comm, code, rows, counts)
        part = part if before is None else part + before[index]
        part = jnp.where(index * part.size + jnp.arange(part.size) < buffer.size, part, 0)
        answer = code.encode(part, jnp.asarray(counts)[index])
        total = code.decode(comm.all_gather(answer)).reshape(-1)[: buffer.size].astype(buffer.dtype)
        if before is None:
            return total, state
        lost = jnp.zeros_like(rows).at[index].set((part - code.decode(answer)).astype(rows.dtype))
        kept = {"sent": (rows - stood).astype(rows.dtype), "summed": lost}
        leaves = {kind: split(bucket._replace(buffer=x.reshape(-1)[: buffer.size])) for kind, x in kept.items()}
        return total, _by_leaf(leaves)

    def scatter(comm: Communicator, bucket: GradRows, state: State) -> tuple[Array, State]:
        rows = bucket.buffer
        if not is_float(rows.dtype):
            return comm.reduce_scatter(rows), state
        if error_feedback:
            rows = rows + bucket.rows_of([leaf["sent"] for leaf in state])
        width = rows.shape[1]
        filled = ((0, 0), (0, -width % code.block))
        counts = np.pad(bucket.true, filled).reshape(comm.size, -1, code.block).sum(-1)
        part, stood = _scattered(comm, code, jnp.pad(rows, filled), counts)
        part = part[:width].astype(rows.dtype)
        if not error_feedback:
            return part, state
        left = bucket.leaves_of((rows - stood[:, :width]).astype(rows.dtype))
        return part, tuple(leaf | {"sent": x} for leaf, x in zip(state, left))

    return Hook(init, apply, name, scatter=scatter)


def _scattered(
    comm: Communicator, code: Code, rows: Float[Array, "replicas m"], counts: Int[np.ndarray, "replicas n"]
) -> tuple[Float[Array, " m"], Float[Array, "replicas m"]]:
    """Sums a row for each replica: gives the sum of this replica's own, and the numbers that stood for `rows` in it."""
    words = code.encode(rows, counts)
    return added(code.decode(comm.all_to_all(words))), code.decode(words)


def _flat(state: State, kind: str) -> Float[Array, " n"]:
    return jnp.concatenate([leaf[kind].reshape(-1) for leaf in state])


def _by_leaf(leaves: dict[str, list[Array]]) -> State:
    return tuple(dict(zip(leaves, values)) for values in zip(*leaves.values()))


def _check_block(hook: str, block: int, each: int) -> None:
    check_whole(f"{hook}: block", block, 1)
    if block % each:
        raise ValueError(f"{hook}: block must be a multiple of {each}, so that numbers fill bytes, got {block!r}.")
