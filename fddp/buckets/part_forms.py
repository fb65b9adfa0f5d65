"""Shapes of equal shards of an array, one per replica.

An array is cut flat, and a stack layer by layer. Each device cuts its part of a tensor-parallel
array.
"""

import math

from fddp.buckets.by_device import UNCUT, DeviceCut

MOST_LAYERS = 256  # no loop over layers has more
LINE = 32  # elements of 32 bits in a cache line of 128 bytes


def part_of(shape: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
    """Shape of a shard of a leaf, padding included."""
    size = math.prod(shape)
    return part_dims(size, num_shards, depth_of(size, shape, num_shards))


def part_dims(size: int, num_shards: int, depth: int = 1) -> tuple[int, ...]:
    """Shape of a shard, padding included: flat, or a row for each of `depth` layers.

    >>> part_dims(12 * 100, 8), part_dims(12 * 100, 8, depth=12)
    ((150,), (12, 13))
    """
    width = -(-(size // depth) // num_shards)
    return (depth, width) if depth > 1 else (width,)


def depth_of(size: int, shape: tuple[int, ...], num_shards: int) -> int:
    """Number of layers of an array that are cut separately; 1: it is cut flat.

    The array has `size` elements. It is the leaf of shape `shape`, or belongs to it. The state is
    laid out before any loop is traced, so only shapes decide. Arrays of two dims count as matrices,
    those of more dims as stacks. A layer's shard is at least one cache line of a GPU, so that
    padding is less than 3 %, and copies are as fast as those of flat arrays.

    >>> depth_of(12 * 64 * 64, (12, 64, 64), 8), depth_of(64, (64,), 8)
    (12, 1)
    >>> depth_of(128 * 64, (128, 64), 8)
    1
    """
    layers, *layer_shape = shape or (1,)
    is_stack = len(layer_shape) > 1 and 1 < layers <= MOST_LAYERS and size == math.prod(shape)
    return layers if is_stack and size >= layers * num_shards * LINE else 1


def cut_as_leaf(
    size: int, shape: tuple[int, ...], num_shards: int, cut: DeviceCut = UNCUT
) -> tuple[int, DeviceCut]:
    """Returns the depth and the device cut of an array that belongs to a leaf.

    With as many elements as the leaf, such as a moment of Adam, it is cut like the leaf, else flat.
    """
    cut = cut if size == math.prod(shape) else UNCUT
    return cut.parts * depth_of(size // cut.parts, cut.of_device(shape), num_shards), cut
