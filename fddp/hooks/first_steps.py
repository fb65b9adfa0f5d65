"""A hook that starts with another hook: compression harms early gradients most."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.comm import Communicator, add_bytes, as_uint32, count_aside
from fddp.hooks.hook import GradBucket, GradRows, Hook, State, allreduce, check_hook
from fddp.wording import check_whole


def starting(step: int, hook: Hook, first: Hook | None = None) -> Hook:
    """Uses the hook `first` for some steps, and then `hook` (PyTorch's `start_powerSGD_iter`).

    Compression harms early gradients most.

    Args:
      step: number of steps before `hook` starts; in shards each micro-batch counts.
      hook: the hook for later steps.
      first: the hook for the first steps. None: `allreduce()`.

    Returns:
      The hook.

    Raises:
      ValueError: step is not an integer of 0 or more.
    """
    check_whole("starting: step", step, 0)
    check_hook("starting: hook", hook)
    first = allreduce() if first is None else check_hook("starting: first", first)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return {
            "step": jnp.zeros((), jnp.int32),
            "first": first.init(leaf),
            "then": hook.init(leaf),
        }

    def of_step(first: Callable[..., Any], then: Callable[..., Any]) -> Any:
        """Selects one of two functions of hooks by the number of the step."""

        def apply(
            comm: Communicator, bucket: GradBucket | GradRows, memory: State
        ) -> tuple[Array, State]:
            def phase(reduce: Callable[..., Any], name: str) -> Callable[[State], Any]:
                def run(memory: State) -> Any:
                    hook_memory = tuple(leaf[name] for leaf in memory)
                    (total, hook_memory), nbytes = count_aside(comm, reduce, bucket, hook_memory)
                    return (
                        total,
                        tuple(leaf | {name: new} for leaf, new in zip(memory, hook_memory)),
                        as_uint32(nbytes),
                    )

                return run

            early = memory[0]["step"] < step
            total, memory, nbytes = jax.lax.cond(
                early, phase(first, "first"), phase(then, "then"), memory
            )
            add_bytes(comm, nbytes)
            return total, tuple(leaf | {"step": leaf["step"] + 1} for leaf in memory)

        return apply

    scatter = of_step(first.scatter, hook.scatter) if first.scatter and hook.scatter else None
    name = f"starting({step}, {hook.name}, {first.name})"
    return Hook(init, of_step(first.apply, hook.apply), name, scatter=scatter)
