"""A hook that sends each bucket with its own number of bits, as many as computing can hide.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 6.2.3, which leaves the level of
compression open.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator
from fddp.hooks.coded import coded
from fddp.hooks.codes import floats, integers, signs
from fddp.hooks.hook import GradBucket, GradRows, Hook, State, flat_buffer, of_floats
from fddp.wording import check_has

BLOCK = 256
BITS = (32, 16, 8, 4, 1)


def adaptive(bits: Sequence[int] = (8,)) -> Hook:
    """Sends each bucket with its own number of bits: 32, 16, 8, 4 or 1.

    Errors are added to the next step's gradients and sums. Their memory has the same form for all
    bits, so a step with other bits continues from the state.

    Args:
      bits: bits per number of each bucket; the last entry holds for all further buckets.

    Returns:
      The hook.

    Raises:
      ValueError: bits is empty, or contains other numbers.

    Example:
      >>> import fddp
      >>> fddp.hooks.adaptive([32, 8])
      Hook(adaptive(32, 8))
    """
    check_has("__iter__", "adaptive: bits", bits, "a sequence of numbers, [8]")
    bits = tuple(bits)
    if not bits or not all(isinstance(x, Integral) and x in BITS and x is not True for x in bits):
        raise ValueError(
            f"adaptive: bits must be some of {', '.join(map(str, BITS))}, got {bits!r}."
        )
    name = f"adaptive({', '.join(map(str, bits))})"
    codes = {
        16: floats(jnp.bfloat16),
        8: integers(8, BLOCK),
        4: integers(4, BLOCK),
        1: signs(BLOCK),
    }
    hooks: dict[int, Any] = {n: coded(code, name, error_feedback=True) for n, code in codes.items()}
    hooks[32] = _plain(hooks[16].init)

    def hook_of(bucket: GradBucket | GradRows) -> Any:
        return hooks[bits[min(bucket.number, len(bits) - 1)]]

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        return hook_of(bucket).apply(comm, bucket, memory)

    def scatter(comm: Communicator, bucket: GradRows, memory: State) -> tuple[Array, State]:
        return hook_of(bucket).scatter(comm, bucket, memory)

    return Hook(hooks[16].init, apply, name, scatter=scatter, bits=bits)


def _plain(init: Callable[[jax.ShapeDtypeStruct], Any]) -> Hook:
    """Sums plainly, and adds the errors of codes in earlier steps."""

    def errors(memory: State) -> list[Array]:
        return [leaf["sent"] + leaf["summed"] for leaf in memory]

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        compensated = bucket.buffer + flat_buffer(errors(memory))
        return comm.all_reduce(compensated), jax.tree.map(jnp.zeros_like, memory)

    def scatter(comm: Communicator, bucket: GradRows, memory: State) -> tuple[Array, State]:
        rows = bucket.buffer + bucket.rows_of(errors(memory))
        return comm.reduce_scatter(rows), jax.tree.map(jnp.zeros_like, memory)

    return of_floats(Hook(init, apply, "plain", scatter=scatter))
