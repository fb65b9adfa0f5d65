"""A hook that sends the momentum of gradients through another hook, for an optimizer whose variance is frozen.

What is nearly the same in every step survives few bits better than what is new: so 1-bit Adam compresses momentum. To
compress gradients and to take their momentum afterwards is not the same, as no code of few bits is linear.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML
2021), algorithm 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator, add_bytes, as_uint32, count_aside
from fddp.hooks.hook import GradBucket, Hook, State, check_hook, split
from fddp.wording import check_whole


def momentum(hook: Hook, *, start: int, b1: float = 0.9) -> Hook:
    """Gives the optimizer the mean gradient for some steps, and then their momentum, which `hook` sums.

    From then on a replica sends b1·m + (1 − b1)·g of the common momentum m and its own gradient g, and what comes back
    is the new m. The optimizer must take it so: see 1-bit Adam in `docs/hooks.md`. Replicas must bring equally many
    rows in each step.

    Args:
      hook: sums the momentum: `sign()`, say.
      start: number of steps before it begins.
      b1: decay of the momentum, from 0 to below 1.

    Returns:
      The hook.

    Raises:
      ValueError: a number is out of its range.
    """
    check_hook("momentum: hook", hook)
    check_whole("momentum: start", start, 0)
    if isinstance(b1, bool) or not isinstance(b1, int | float) or not 0 <= b1 < 1:
        raise ValueError(f"momentum: b1 must be 0 or more and below 1, got {b1!r}.")

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        mean = jnp.zeros(leaf.shape, leaf.dtype)
        return {"step": jnp.zeros((), jnp.int32), "momentum": mean, "hook": hook.init(leaf)}

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        before = jnp.concatenate([leaf["momentum"].reshape(-1) for leaf in state])

        def plain(comm: Communicator, own: State) -> Any:
            total = comm.all_reduce(bucket.buffer)
            return total, _decayed(before, total, b1), own

        def through_hook(comm: Communicator, own: State) -> Any:
            mine = bucket._replace(buffer=_decayed(before / comm.size, bucket.buffer, b1))
            total, own = hook.apply(comm, mine, own)
            return total, total, own

        def counted(phase: Callable[[Communicator, State], Any]) -> Callable[[State], Any]:
            def run(own: State) -> Any:
                made, sent = count_aside(comm, phase, own)
                return *made, as_uint32(sent)

            return run

        step = state[0]["step"]
        own = tuple(leaf["hook"] for leaf in state)
        total, new, own, sent = jax.lax.cond(step < start, counted(plain), counted(through_hook), own)
        add_bytes(comm, sent)
        each = zip(split(bucket._replace(buffer=new)), own)
        return total, tuple({"step": step + 1, "momentum": x, "hook": memory} for x, memory in each)

    return Hook(init, apply, f"momentum({hook.name}, start={start}, b1={b1})")


def _decayed(before: Array, new: Array, b1: float) -> Array:
    return (b1 * before + (1 - b1) * new).astype(new.dtype)
