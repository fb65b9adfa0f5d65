"""Which arrays a program may have as its own memory: those of its devices, each with its own."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import PyTree

from fddp.jax_internals import parts_here


class Donation:
    """The check of the arrays that a program takes as its own memory.

    Each step checks each leaf of its state, so it must be fast. Results of the last program have
    memory of their own. They are recognized by their ids: weak references would take a seventh of
    the step of 800 small leaves. Another array may have the id of a freed result. If it shares
    memory with a further array of the state, XLA refuses to donate that memory twice.
    """

    def __init__(self, sharding: Sharding | None) -> None:
        self._sharding = sharding
        self._results = frozenset[int]()

    def record(self, results: PyTree) -> None:
        self._results = frozenset(map(id, jax.tree.leaves(results)))

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Returns True if all values are JAX arrays of the sharding, to be donated together."""
        if self._sharding is None:
            return False
        if not all(issubclass(kind, jax.Array) for kind in set(map(type, arrays))):
            return False
        if set(map(attrgetter("sharding"), arrays)) != {self._sharding}:
            return False
        if self._own(arrays):
            # A cold processor takes a microsecond for each array, and a program that takes a state
            # takes its step.
            return not arrays[0].is_deleted()
        if any(x.is_deleted() for x in arrays):
            return False
        parts = [parts_here(x) for x in arrays] if len(self._sharding.device_set) > 1 else []
        if True in [part.is_deleted() for several in parts for part in several]:
            return False
        return len(set(_addresses(arrays))) == len(arrays)

    def unshared(self, tree: PyTree) -> Any:
        """Copies each array that shares memory with an earlier one: memory is donated only once."""
        leaves, treedef = jax.tree.flatten(tree)
        at = [k for k, x in enumerate(leaves) if not isinstance(x, jax.ShapeDtypeStruct)]
        arrays = [leaves[k] for k in at]
        if self._own(arrays):
            return tree
        known = set[int]()
        for k, address in zip(at, _addresses(arrays)):
            if address in known:
                leaves[k] = leaves[k].copy()
            known.add(address)
        return treedef.unflatten(leaves)

    def _own(self, arrays: Sequence[Any]) -> bool:
        """Returns True if the arrays are different results of the last program."""
        numbers = set(map(id, arrays))
        return len(numbers) == len(arrays) and numbers <= self._results


def _addresses(arrays: Sequence[jax.Array]) -> list[int]:
    """The memory of each array on the first device."""
    # An address waits for its array and holds the GIL, which the program's messages need.
    jax.block_until_ready(arrays)
    return [parts_here(x)[0].unsafe_buffer_pointer() for x in arrays]
