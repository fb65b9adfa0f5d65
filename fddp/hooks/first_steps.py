"""A hook that uses another one for the first steps: compression harms early gradients most."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator, add_bytes, as_uint32, count_aside
from fddp.hooks.hook import Hook, State, allreduce, check_hook
from fddp.wording import check_whole


def starting(step: int, hook: Hook, first: Hook | None = None) -> Hook:
    """Uses another hook for the first steps: compression harms early gradients most (PyTorch's `start_powerSGD_iter`).

    Args:
      step: number of steps before `hook` begins; in shards each micro-batch counts.
      hook: the hook that is used then.
      first: the hook that is used before; None: `allreduce()`.

    Returns:
      The hook.

    Raises:
      ValueError: step is no whole number of 0 or more.
    """
    check_whole("starting: step", step, 0)
    check_hook("starting: hook", hook)
    first = allreduce() if first is None else check_hook("starting: first", first)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return {"step": jnp.zeros((), jnp.int32), "first": first.init(leaf), "then": hook.init(leaf)}

    def of_step(first: Any, then: Any) -> Any:
        """A hook's function: one of two, by the number of the step."""

        def apply(comm: Communicator, bucket: Any, state: State) -> tuple[Array, State]:
            def phase(sum_up: Any, name: str) -> Callable[[State], Any]:
                def run(state: State) -> Any:
                    own = tuple(leaf[name] for leaf in state)
                    (total, own), sent = count_aside(comm, sum_up, bucket, own)
                    return total, tuple(leaf | {name: new} for leaf, new in zip(state, own)), as_uint32(sent)

                return run

            early = state[0]["step"] < step
            total, state, sent = jax.lax.cond(early, phase(first, "first"), phase(then, "then"), state)
            add_bytes(comm, sent)
            return total, tuple(leaf | {"step": leaf["step"] + 1} for leaf in state)

        return apply

    scatter = of_step(first.scatter, hook.scatter) if first.scatter and hook.scatter else None
    name = f"starting({step}, {hook.name}, {first.name})"
    return Hook(init, of_step(first.apply, hook.apply), name, scatter=scatter)
