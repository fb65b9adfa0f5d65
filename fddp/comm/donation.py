"""Which arrays a program may have as its own memory: those of its devices, each with its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import PyTree

from fddp.jax_internals import parts_here


def holding(sharding: Sharding) -> Callable[[Sequence[Any]], bool]:
    """Makes a function: True if all values are JAX arrays of this sharding, to be donated together.

    None is donated already, and no two share memory.

    Each step checks each leaf of its state, so it must be fast. A program's outputs have the same
    sharding objects in each step, and lists compare identities first.
    """
    last = list[Sharding]()

    def holds(arrays: Sequence[Any]) -> bool:
        if not all(issubclass(kind, jax.Array) for kind in set(map(type, arrays))):
            return False
        shardings = [x.sharding for x in arrays]
        if shardings != last:
            if shardings.count(sharding) < len(shardings):
                return False
            last[:] = shardings
        if True in [x.is_deleted() for x in arrays]:
            return False
        firsts = arrays
        if len(sharding.device_set) > 1:
            parts = [parts_here(x) for x in arrays]
            if True in [part.is_deleted() for x in parts for part in x]:
                return False
            firsts = [x[0] for x in parts]
        return len(set(map(_memory, firsts))) == len(arrays)

    return holds


def unshared(tree: PyTree) -> Any:
    """Copies each array that shares memory with an earlier one: memory is donated only once."""
    known = set[int]()

    def own(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        memory = _memory(parts_here(x)[0])
        if memory in known:
            return x.copy()
        known.add(memory)
        return x

    return jax.tree.map(own, tree)


def _memory(x: jax.Array) -> int:
    """The address of an array; another number for a result that is not there yet.

    The address of such a result would wait for its program and hold the GIL, which the program's
    messages need. Results of programs have memory of their own.
    """
    is_ready = getattr(x, "is_ready", lambda: False)  # random keys have none
    return x.unsafe_buffer_pointer() if is_ready() else -id(x)
