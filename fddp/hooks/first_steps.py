"""A hook that starts with another hook: compression harms early gradients most."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.comm import Communicator, add_bytes, as_uint32, count_aside
from fddp.hooks.hook import Hook, Reduce, State, allreduce, check_hook
from fddp.wording import check_whole

# (communicator, memory) → outputs
Phase: TypeAlias = Callable[[Communicator, State], Any]


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
    if first is None:
        first = allreduce()
    check_hook("starting: first", first)

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        return {
            "step": jnp.zeros((), jnp.int32),
            "first": first.init(leaf),
            "then": hook.init(leaf),
        }

    def reduce(
        before: Reduce, after: Reduce, comm: Communicator, bucket: Any, memory: State
    ) -> tuple[Array, State]:
        def phase(name: str, reduce: Reduce, comm: Communicator, memory: State) -> Any:
            total, new = reduce(comm, bucket, tuple(leaf[name] for leaf in memory))
            return total, tuple(leaf | {name: x} for leaf, x in zip(memory, new))

        early = memory[0]["step"] < step
        phases = partial(phase, "first", before), partial(phase, "then", after)
        total, memory = one_phase(comm, early, *phases, memory)
        return total, tuple(leaf | {"step": leaf["step"] + 1} for leaf in memory)

    scatter = None
    if first.scatter and hook.scatter:
        scatter = partial(reduce, first.scatter, hook.scatter)
    name = f"starting({step}, {hook.name}, {first.name})"
    return Hook(init, partial(reduce, first.apply, hook.apply), name, scatter=scatter)


def one_phase(
    comm: Communicator, early: Bool[Array, ""], first: Phase, then: Phase, memory: State
) -> Any:
    """Runs one of two phases, and counts the bytes of that one."""

    def counted(phase: Phase, memory: State) -> Any:
        outputs, nbytes = count_aside(comm, phase, memory)
        return outputs, as_uint32(nbytes)

    outputs, nbytes = jax.lax.cond(early, partial(counted, first), partial(counted, then), memory)
    add_bytes(comm, nbytes)
    return outputs
