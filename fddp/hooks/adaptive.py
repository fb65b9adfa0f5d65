"""A hook that sends each bucket in bits of its own, as many as fit under what is computed.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 6.2.3, which leaves the level of compression open.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator
from fddp.hooks.coded import coded
from fddp.hooks.codes import floats, integers, signs
from fddp.hooks.hook import GradBucket, GradRows, Hook, State
from fddp.hooks.narrow import is_float
from fddp.wording import check_has

BLOCK = 256
BITS = (32, 16, 8, 4, 1)


def adaptive(bits: Sequence[int] = (8,)) -> Hook:
    """Sends each bucket in as many bits a number as it is given: 32, 16, 8, 4 or 1.

    `fddp.fit_bits` measures and chooses them, `fddp.refit_bits` chooses again. What is lost is added to the next step's
    gradients and sums, in the same memory whatever the bits are: a step with other bits goes on from the state.

    Args:
      bits: of each bucket in turn; the last ones hold for all that follow.

    Returns:
      The hook.

    Raises:
      ValueError: no bits, or others than these.

    Example:
      >>> import fddp
      >>> fddp.hooks.adaptive([32, 8])
      Hook(adaptive(32, 8))
    """
    check_has("__iter__", "adaptive: bits", bits, "a sequence of numbers, [8]")
    if not bits or not set(bits) <= set(BITS):
        raise ValueError(f"adaptive: bits must be some of {', '.join(map(str, BITS))}, got {bits!r}.")
    name = f"adaptive({', '.join(map(str, bits))})"
    codes = {16: floats(jnp.bfloat16), 8: integers(8, BLOCK), 4: integers(4, BLOCK), 1: signs(BLOCK)}
    hooks: dict[int, Any] = {n: coded(code, name, error_feedback=True) for n, code in codes.items()}
    hooks[32] = _plain(hooks[16].init)

    def of(bucket: GradBucket | GradRows) -> Any:
        return hooks[bits[min(bucket.number, len(bits) - 1)]]

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        return of(bucket).apply(comm, bucket, state)

    def scatter(comm: Communicator, bucket: GradRows, state: State) -> tuple[Array, State]:
        return of(bucket).scatter(comm, bucket, state)

    return Hook(hooks[16].init, apply, name, scatter=scatter, bits=tuple(bits))


def _plain(init: Callable[[jax.ShapeDtypeStruct], Any]) -> Hook:
    """Sums plainly, with all that a code has lost of earlier numbers, and loses nothing."""

    def left(state: State) -> list[Array]:
        return [leaf["sent"] + leaf["summed"] for leaf in state]

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        if not is_float(bucket.buffer.dtype):
            return comm.all_reduce(bucket.buffer), state
        more = jnp.concatenate([x.reshape(-1) for x in left(state)])
        return comm.all_reduce(bucket.buffer + more), jax.tree.map(jnp.zeros_like, state)

    def scatter(comm: Communicator, bucket: GradRows, state: State) -> tuple[Array, State]:
        if not is_float(bucket.buffer.dtype):
            return comm.reduce_scatter(bucket.buffer), state
        rows = bucket.buffer + bucket.rows_of(left(state))
        return comm.reduce_scatter(rows), jax.tree.map(jnp.zeros_like, state)

    return Hook(init, apply, "plain", scatter=scatter)
