"""The forms of equal parts of arrays, one for each replica.

An array is cut as a whole, or, where it is a stack, each of its layers by itself. Where the devices of a replica hold
parts of it, each of these is cut so.
"""

import math

from fddp.buckets.by_device import UNCUT, DeviceCut

MOST_LAYERS = 256  # no loop over layers has more
LINE = 32  # 128 bytes of 32-bit numbers


def part_of(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The dims of each of `parts` equal parts of a leaf, padding at the ends included."""
    size = math.prod(shape)
    return part_dims(size, parts, depth_of(size, shape, parts))


def part_dims(size: int, parts: int, depth: int = 1) -> tuple[int, ...]:
    """Finds the dims of each of `parts` equal parts of an array, padding at the ends included.

    Args:
      size: elements of the array.
      parts: number of parts.
      depth: number of rows that are cut each by itself; 1: the array is cut as a whole.

    Returns:
      The dims: a row for each where there are several, else the part is flat.

    Example:
      >>> part_dims(12 * 100, 8), part_dims(12 * 100, 8, depth=12)
      ((150,), (12, 13))
    """
    width = -(-(size // depth) // parts)
    return (depth, width) if depth > 1 else (width,)


def depth_of(size: int, shape: tuple[int, ...], parts: int) -> int:
    """Finds how many layers of an array are cut each by itself: those of a stack, which loops make layer by layer.

    Forms alone decide, as a state is laid out before a loop is seen: arrays of two dims are matrices, as a rule. Each
    part of a layer is at least a line of a GPU's cache, so that padding is less than 3 %, and copies are as fast as
    those of whole arrays.

    Args:
      size: elements of an array that belongs to a leaf: the leaf's own number, or the array is cut as a whole.
      shape: dims of the leaf.
      parts: number of parts.

    Returns:
      The number; 1: the array is cut as a whole.

    Example:
      >>> depth_of(12 * 64 * 64, (12, 64, 64), 8), depth_of(64, (64,), 8), depth_of(128 * 64, (128, 64), 8)
      (12, 1, 1)
    """
    layers, *more = shape or (1,)
    stack = len(more) > 1 and 1 < layers <= MOST_LAYERS and size == math.prod(shape)
    return layers if stack and size >= layers * parts * LINE else 1


def cut_as_leaf(size: int, shape: tuple[int, ...], parts: int, cut: DeviceCut = UNCUT) -> tuple[int, DeviceCut]:
    """Finds how an array that belongs to a leaf is cut: as the leaf itself, where it has as many elements.

    Args:
      size: elements of the array.
      shape: dims of the leaf.
      parts: number of parts, one for each replica.
      cut: the parts of the leaf that the devices of a replica hold.

    Returns:
      The number of rows that are cut each by itself, the layers of each device's part; and these devices' parts.
    """
    cut = cut if size == math.prod(shape) else UNCUT
    return cut.parts * depth_of(size // cut.parts, cut.of_device(shape), parts), cut
