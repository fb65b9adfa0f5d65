"""Arrays in equal parts, one per replica: their layout, and such arrays as leaves of a tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, PyTree, Shaped

MOST_LAYERS = 256  # no loop over layers has more
LINE = 32  # elements of 32 bits in a cache line of 128 bytes


@dataclass(frozen=True)
class ShardLayout:
    """An array in equal parts, one per replica, padded with zeros.

    An array is cut flat, and a stack layer by layer, so that a part of some of its layers can be
    sent separately.

    >>> layout = ShardLayout((2, 5), parts=3, depth=2)
    >>> parts = layout.split(jnp.arange(1, 11).reshape(2, 5))
    >>> parts[2].tolist(), layout.dims
    ([[5, 0], [10, 0]], (2, 2))
    >>> layout.join(parts).tolist()
    [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    """

    shape: tuple[int, ...]
    """Shape of the whole array."""
    parts: int = 1
    """Number of replicas that share the array."""
    depth: int = 1
    """Number of layers of a stack, which are cut separately. 1: the array is cut flat."""
    ranks: tuple[int, ...] | None = None
    """Global numbers of the processes that hold the parts. None: those of the array's mesh."""

    @property
    def layer_size(self) -> int:
        """Number of elements of a whole layer."""
        return prod(self.shape) // self.depth

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of a part, padding included: flat, or with one for each of `depth` layers."""
        width = -(-self.layer_size // self.parts)
        return (self.depth, width) if self.depth > 1 else (width,)

    @property
    def padding(self) -> int:
        """Number of zeros in all parts."""
        return self.parts * prod(self.dims) - prod(self.shape)

    def of(self, shape: tuple[int, ...]) -> "ShardLayout":
        """The layout of an array of this leaf, such as a moment: flat if its size differs."""
        depth = self.depth if prod(shape) == prod(self.shape) else 1
        return replace(self, shape=shape, depth=depth)

    def split(self, x: Shaped[Array, " *dims"]) -> Shaped[Array, "parts ... n"]:
        """Cuts an array into parts of shape `dims`, along a new first dim."""
        layers = x.reshape(self.depth, self.layer_size)
        padding = self.dims[-1] * self.parts - self.layer_size
        padded = layers
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # JAX pads no keys
            padded = jnp.pad(layers, ((0, 0), (0, padding)))
        if self.depth == 1:  # needs no copy
            return padded.reshape(self.parts, *self.dims)
        # Whole layers are copied: XLA's CPU backend transposes element by element.
        return jnp.stack(jnp.split(padded, self.parts, axis=1)).reshape(self.parts, *self.dims)

    def join(self, pieces: Shaped[Array, "... n"]) -> Shaped[Array, " *dims"]:
        """Joins the parts of all replicas, stacked or concatenated: the inverse of `split`."""
        width = pieces.shape[-1]
        parts = prod(pieces.shape[:-1]) // self.depth  # 1 for flat parts that are concatenated
        layers = jnp.swapaxes(pieces.reshape(parts, self.depth, width), 0, 1)
        layers = layers.reshape(self.depth, parts * width)
        return layers[:, : self.layer_size].reshape(self.shape)

    def part(self, x: Shaped[Array, " *dims"], index: Int32[Array, ""]) -> Shaped[Array, " *part"]:
        """Returns the part of replica `index`."""
        if self.parts == 1:
            return x.reshape(self.dims)
        return jax.lax.dynamic_index_in_dim(self.split(x), index, keepdims=False)

    def mask(self, index: Int32[Array, ""]) -> Bool[Array, " *part"]:
        """Marks the elements of a replica's part that are not padding."""
        # Computed on the host: a large array has more elements than 32 bits count.
        width = self.dims[-1]
        lengths = np.clip(self.layer_size - width * np.arange(self.parts), 0, width)
        layer = jnp.arange(width) < jnp.asarray(lengths, jnp.int32)[index]
        return jnp.broadcast_to(layer, self.dims)


def leaf_layout(shape: tuple[int, ...], parts: int) -> ShardLayout:
    """Chooses the layout of a leaf: a stack is cut layer by layer.

    The state is laid out before any loop is traced, so only shapes decide. Arrays of two dims count
    as matrices, those of more dims as stacks. A layer's part is at least one cache line of a GPU,
    so that padding is less than 3 %, and copies are as fast as those of flat arrays.
    """
    layers, *layer_shape = shape or (1,)
    is_stack = len(layer_shape) > 1 and 1 < layers <= MOST_LAYERS
    if not is_stack or prod(layer_shape) < parts * LINE:
        layers = 1
    return ShardLayout(shape, parts, layers)


### Shards in a state


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
