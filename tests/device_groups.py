"""Parses the device groups of a collective, in the three notations of XLA.

Source: `replica_group.cc` and `tile_assignment.cc` in XLA.
"""

import math
import re

import numpy as np

Devices = tuple[tuple[int, ...], ...]
AXIS = r"'([^']+)'"


def device_groups(text: str) -> Devices:
    """Parses the device groups of a collective, as positions in the mesh.

    "{{0,2},{1,3}}" lists the groups, or the pairs of a permutation. "[2,2]<=[2,2]T(1,0)" reshapes
    the numbers from 0, transposes them and cuts them into groups. "mesh['a'=2,'b'=2] {'a'}" groups
    along axes of a mesh. An empty text is no group: all devices form one. Any other text raises a
    ValueError.

    >>> texts = "{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'a'}"
    >>> [device_groups(text) for text in texts]
    [((0, 2), (1, 3)), ((0, 2), (1, 3)), ((0, 2), (1, 3))]
    """
    if re.fullmatch(r"\{(\{[\d,]+\},?)*\}|", text):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))
    if tiles := re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = _numbers(tiles[3])
        ids = np.arange(math.prod(shape)).reshape(shape)
        if tiles[4]:
            ids = ids.transpose(_numbers(tiles[4]))
        return _dealt_out(ids, int(tiles[2]))
    if re.fullmatch(rf"mesh\[(?:{AXIS}=\d+,?)+\] \{{(?:{AXIS},?)+\}}", text):
        mesh, _, grouped = text.partition("] ")
        sizes = {name: int(size) for name, size in re.findall(rf"{AXIS}=(\d+)", mesh)}
        group_axes = re.findall(AXIS, grouped)
        order = [*(name for name in sizes if name not in group_axes), *group_axes]
        ids = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        return _dealt_out(
            ids.transpose([*map([*sizes].index, order)]),
            math.prod(sizes[name] for name in group_axes),
        )
    raise ValueError(
        f"the devices of a collective are written in a way that fddp cannot read: {text}"
    )


def _dealt_out(ids: np.ndarray, size: int) -> Devices:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
