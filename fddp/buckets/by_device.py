"""Tensor-parallel parts of leaves, one per device of a replica, and functions of such parts."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, PyTree

from fddp.jax_internals import over_axes, part_shape

Function = TypeVar("Function", bound=Callable[..., Any])


class DeviceCut(NamedTuple):
    """The tensor-parallel parts of a leaf. Without `dims` each device holds the whole leaf."""

    spec: PartitionSpec = PartitionSpec()
    """The mesh axes along which each dim is cut."""
    dims: tuple[tuple[int, int], ...] = ()
    """Number of parts and length of a part, per dim."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which the leaf is cut, from the first dim to the last."""
        axes = list[str]()
        for entry in self.spec:
            if isinstance(entry, tuple):
                axes += entry
            elif entry is not None:
                axes.append(entry)
        return tuple(axes)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return prod(count for count, _ in self.dims)

    @property
    def rows(self) -> PartitionSpec:
        """Spec of an array that concatenates the rows of all parts along its first dim."""
        return PartitionSpec(self.axes) if self.axes else PartitionSpec()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf; () if it is not cut."""
        return tuple(count * length for count, length in self.dims)

    def of_device(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of one device, for a leaf of shape `shape`."""
        return tuple(length for _, length in self.dims) if self.dims else shape

    def stacked(self, x: Array | np.ndarray) -> Any:
        """Stacks the parts of a JAX or NumPy array along a new first dim."""
        if not self.dims:
            return x[None]
        blocks = x.reshape(np.ravel(self.dims).tolist())
        stack = blocks.transpose([*range(0, blocks.ndim, 2), *range(1, blocks.ndim, 2)])
        return stack.reshape(self.parts, *self.of_device(()))

    def joined(self, stack: Array | np.ndarray, shape: tuple[int, ...]) -> Any:
        """Joins stacked parts to an array of shape `shape`: the inverse of `stacked`."""
        if not self.dims:
            return stack.reshape(shape)
        counts, lengths = zip(*self.dims)
        order = np.arange(2 * len(counts)).reshape(2, -1).T.ravel().tolist()
        return stack.reshape([*counts, *lengths]).transpose(order).reshape(shape)


UNCUT = DeviceCut()
"""Each device of a replica holds the whole leaf."""


def device_cut(view: AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]) -> DeviceCut:
    """Returns the tensor-parallel parts of a leaf under `spec`, on the mesh `view` of one replica.

    >>> view = AbstractMesh((2, 4), ("replica", "part"))
    >>> device_cut(view, PartitionSpec(None, "part"), (3, 8)).dims
    ((1, 3), (4, 2))
    """
    part = part_shape(view, spec, shape)
    if part == shape or not prod(shape):
        return UNCUT
    return DeviceCut(spec, tuple((n // length, length) for n, length in zip(shape, part)))


def by_device(axes: tuple[str, ...], f: Function, in_specs: PyTree, out_specs: PyTree) -> Function:
    """Turns `f`, which each device along `axes` runs on its parts, into a function of whole arrays.

    The specs of arguments and results are those of `jax.shard_map`. Without axes `f` is returned
    unchanged.
    """
    if not axes:
        return f
    return over_axes(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
