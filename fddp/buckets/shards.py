"""The arrays of a state that replicas hold in parts, as leaves of its tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, PyTree, Shaped

from fddp.buckets.shard_layout import ShardLayout


@dataclass(frozen=True)
class Shard:
    """An array in equal parts, one per replica. `fddp.whole` joins them.

    Example:
      >>> import jax.numpy as jnp
      >>> Shard(jnp.arange(6.0), ShardLayout((5,), parts=2))
      Shard of float32[5]
    """

    parts: Any
    """The parts of all replicas in order (under MPI the part of this rank), padded at the ends.
    None: removed by `split_shards`."""
    layout: ShardLayout
    """Layout of the array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.layout.shape

    def __repr__(self) -> str:
        if hasattr(self.parts, "dtype"):
            return f"Shard of {self.parts.dtype}{list(self.shape)}"
        # Any other value is the result of a function that was mapped over the array.
        value = "" if self.parts is None else f", {self.parts!r} in place of its parts"
        return f"Shard of shape {list(self.shape)}{value}"

    def __jax_array__(self) -> Any:
        raise TypeError(
            f"a {self!r} is not an array: replicas hold its parts. fddp.whole(state) returns "
            "whole arrays."
        )


jax.tree_util.register_dataclass(Shard, data_fields=["parts"], meta_fields=["layout"])


def is_shard(x: object) -> bool:
    return isinstance(x, Shard)


def leaves_with_shards(tree: PyTree) -> list[Any]:
    """Lists the leaves of a tree; a shard is a leaf."""
    return jax.tree.leaves(tree, is_leaf=is_shard)


def shards_of(tree: PyTree) -> list[Shard]:
    """Lists the shards of a tree."""
    return list(filter(is_shard, leaves_with_shards(tree)))


def map_shards(f: Callable[[Shard], Any], tree: PyTree) -> Any:
    """Maps a function over the shards of a tree; other leaves are unchanged."""
    return jax.tree.map(lambda x: f(x) if is_shard(x) else x, tree, is_leaf=is_shard)


def with_shards(layouts: PyTree, tree: PyTree, part: Callable[[ShardLayout, Any], Any]) -> Any:
    """Replaces the arrays of a tree that have a layout by shards."""

    def shard(layout: ShardLayout | None, x: Any) -> Any:
        return x if layout is None else Shard(part(layout, x), layout)

    return jax.tree.map(shard, layouts, tree, is_leaf=lambda x: x is None)


def whole_forms(tree: PyTree) -> Any:
    """Replaces each shard in a tree by the shape and dtype of its whole array."""
    return map_shards(lambda x: jax.ShapeDtypeStruct(x.shape, x.parts.dtype), tree)


def split_shards(tree: PyTree) -> tuple[Any, list[Shaped[Array, " n"]]]:
    """Replaces the arrays of a tree's shards by None, and returns tree and arrays."""
    arrays = [x.parts for x in shards_of(tree)]
    return map_shards(lambda x: replace(x, parts=None), tree), arrays


def insert_shards(tree: PyTree, arrays: Sequence[Shaped[Array, " n"]]) -> Any:
    """Inserts the arrays of shards into a tree: the inverse of `split_shards`."""
    iterator = iter(arrays)
    return map_shards(lambda x: replace(x, parts=next(iterator)), tree)
