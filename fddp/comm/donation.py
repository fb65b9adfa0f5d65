"""Which arrays a program may have as its own memory: those of its devices, each with its own."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import PyTree

from fddp.jax_internals import parts_here


class Donation:
    """The check of the arrays that a program takes as its own memory.

    Each step checks each leaf of its state, so it must be fast. Results of the last program have
    the sharding, and memory of their own.
    """

    def __init__(self, sharding: Sharding | None) -> None:
        self._sharding = sharding
        self._results = list[weakref.ref[jax.Array]]()

    def record(self, results: PyTree) -> None:
        arrays = (x for x in jax.tree.leaves(results) if isinstance(x, jax.Array))
        self._results = list(map(weakref.ref, arrays))

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Returns True if all values are JAX arrays of the sharding, to be donated together."""
        if self._sharding is None:
            return False
        own = self._own(arrays)
        if not own and not all(
            isinstance(x, jax.Array) and x.sharding == self._sharding for x in arrays
        ):
            return False
        if True in [x.is_deleted() for x in arrays]:
            return False
        parts = [parts_here(x) for x in arrays] if len(self._sharding.device_set) > 1 else []
        if True in [part.is_deleted() for several in parts for part in several]:
            return False
        return own or len(set(_addresses(arrays))) == len(arrays)

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
        return len(numbers) == len(arrays) and numbers <= {id(ref()) for ref in self._results}


def _addresses(arrays: Sequence[jax.Array]) -> list[int]:
    """The memory of each array on the first device."""
    # An address waits for its array and holds the GIL, which the program's messages need.
    jax.block_until_ready(arrays)
    return [parts_here(x)[0].unsafe_buffer_pointer() for x in arrays]
