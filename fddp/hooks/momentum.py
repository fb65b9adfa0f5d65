"""A hook that sends the momentum of gradients, for optimizers with a frozen variance.

Few bits lose less of slowly changing values than of new ones, so 1-bit Adam compresses the
momentum. The momentum of compressed gradients would differ, since codes of few bits are not linear.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed" (ICML 2021), algorithm 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator
from fddp.hooks.first_steps import one_phase
from fddp.hooks.hook import GradBucket, Hook, State, check_hook, join_memory, leaves_of_buffer
from fddp.wording import check_range, check_whole


def momentum(hook: Hook, *, start: int, b1: float = 0.9) -> Hook:
    """Sums gradients plainly for some steps, and then their momentum by `hook`.

    From then on a replica with the gradient g sends b1·m + (1 − b1)·g, where m is the common
    momentum. The result is the new m. It replaces the gradient in the optimizer: see 1-bit Adam in
    `docs/hooks.md`. Replicas must have equal numbers of rows in each step.

    Args:
      hook: the hook that sums the momentum, such as `sign()`.
      start: number of steps before the momentum is sent.
      b1: decay of the momentum, from 0 to below 1.

    Returns:
      The hook.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: `hook` is not a hook, or `b1` not a number.
    """
    check_hook("momentum: hook", hook)
    check_whole("momentum: start", start, 0)
    b1 = check_range("momentum: b1", b1, "0 or more and below 1", lambda x: 0 <= x < 1)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        zeros = jnp.zeros(leaf.shape, leaf.dtype)
        return {"step": jnp.zeros((), jnp.int32), "momentum": zeros, "hook": hook.init(leaf)}

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        old_momentum = join_memory(memory, "momentum")

        def plain(comm: Communicator, hook_memory: State) -> Any:
            total = comm.all_reduce(bucket.buffer)
            return total, _decayed(old_momentum, total, b1), hook_memory

        def through_hook(comm: Communicator, hook_memory: State) -> Any:
            summand = bucket._replace(buffer=_decayed(old_momentum / comm.size, bucket.buffer, b1))
            total, hook_memory = hook.apply(comm, summand, hook_memory)
            return total, total, hook_memory

        step = memory[0]["step"]
        hook_memory = tuple(leaf["hook"] for leaf in memory)
        total, new_momentum, hook_memory = one_phase(
            comm, step < start, plain, through_hook, hook_memory
        )
        leaves = zip(leaves_of_buffer(new_momentum, bucket.leaves), hook_memory)
        return total, tuple({"step": step + 1, "momentum": m, "hook": x} for m, x in leaves)

    return Hook(init, apply, f"momentum({hook.name}, start={start}, b1={b1})")


def _decayed(momentum: Array, gradient: Array, b1: float) -> Array:
    return (b1 * momentum + (1 - b1) * gradient).astype(gradient.dtype)
