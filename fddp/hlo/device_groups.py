"""Reads the groups of devices of a collective, which XLA writes in three ways.

Source: `replica_group.cc` and `tile_assignment.cc` in XLA.
"""

import math
import re

import numpy as np

Devices = tuple[tuple[int, ...], ...]
AXIS = r"'([^']+)'"


def device_groups(text: str) -> Devices:
    """Reads the groups of a collective.

    Args:
      text: the groups as XLA writes them. "{{0,2},{1,3}}" lists them, as it lists the pairs of a permutation;
        "[2,2]<=[2,2]T(1,0)" means numbers from 0, in a shape, transposed, and dealt out; "mesh['a'=2,'b'=2] {'a'}"
        means groups along axes of a mesh.

    Returns:
      The devices of each group, as places in the order of the mesh; no group: all devices are one group.

    Raises:
      ValueError: the text is written otherwise.

    Example:
      >>> [device_groups(x) for x in ("{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'a'}")]
      [((0, 2), (1, 3)), ((0, 2), (1, 3)), ((0, 2), (1, 3))]
    """
    if re.fullmatch(r"\{(\{[\d,]+\},?)*\}|", text):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))
    if tiles := re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = _numbers(tiles[3])
        order = _numbers(tiles[4]) if tiles[4] else None
        return _dealt_out(np.arange(math.prod(shape)).reshape(shape).transpose(order), int(tiles[2]))
    if re.fullmatch(rf"mesh\[(?:{AXIS}=\d+,?)+\] \{{(?:{AXIS},?)+\}}", text):
        mesh, _, along = text.partition("] ")
        sizes = {name: int(size) for name, size in re.findall(rf"{AXIS}=(\d+)", mesh)}
        chosen = re.findall(AXIS, along)
        order = [*(name for name in sizes if name not in chosen), *chosen]
        ids = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        return _dealt_out(ids.transpose([*map([*sizes].index, order)]), math.prod(sizes[name] for name in chosen))
    raise ValueError(f"the devices of a collective are written in a way that fddp cannot read: {text}")


def _dealt_out(ids: np.ndarray, size: int) -> Devices:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
