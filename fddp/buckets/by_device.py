"""Leaves that the devices of a replica hold in parts (tensor parallelism), and functions that each device calls."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeVar

from jax.sharding import AbstractMesh, PartitionSpec

from fddp.jax_internals import over_axes, part_shape

Function = TypeVar("Function", bound=Callable[..., Any])


class DeviceCut(NamedTuple):
    """The parts of a leaf that the devices of a replica hold; each device holds all of it where there is no spec."""

    spec: PartitionSpec = PartitionSpec()
    """The mesh axes along which each dim is cut."""
    dims: tuple[tuple[int, int], ...] = ()
    """The number of parts along each dim, and the length of one."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it is cut, from the first dim to the last."""
        each = (entry if isinstance(entry, tuple) else (entry,) for entry in self.spec if entry is not None)
        return tuple(axis for some in each for axis in some)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return prod(number for number, _ in self.dims)

    @property
    def rows(self) -> PartitionSpec:
        """The spec of an array that has the rows of one part behind those of another along its first dim."""
        return PartitionSpec(self.axes) if self.axes else PartitionSpec()

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims of the leaf; () where each device holds all of it."""
        return tuple(number * length for number, length in self.dims)

    def of_device(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dims of one device's part of a leaf with these dims."""
        return tuple(length for _, length in self.dims) if self.dims else shape

    def stacked(self, x: Any) -> Any:
        """Stacks the parts of a whole array along a new first dim; of JAX or NumPy."""
        if not self.dims:
            return x[None]
        split = x.reshape([n for pair in self.dims for n in pair])
        parts = split.transpose([*range(0, split.ndim, 2), *range(1, split.ndim, 2)])
        return parts.reshape(self.parts, *self.of_device(()))

    def joined(self, parts: Any, shape: tuple[int, ...]) -> Any:
        """Joins the parts of an array that has these dims: the inverse of `stacked`."""
        if not self.dims:
            return parts.reshape(shape)
        count = len(self.dims)
        split = parts.reshape([*(number for number, _ in self.dims), *(length for _, length in self.dims)])
        return split.transpose([k + side for k in range(count) for side in (0, count)]).reshape(shape)


UNCUT = DeviceCut()
"""Each device of a replica holds all of the leaf."""


def device_cut(view: AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]) -> DeviceCut:
    """Finds the parts of a leaf.

    Args:
      view: the mesh as one replica sees it.
      spec: the axes along which the leaf is cut.
      shape: dims of the leaf.

    Returns:
      The parts.

    Example:
      >>> device_cut(AbstractMesh((2, 4), ("replica", "part")), PartitionSpec(None, "part"), (3, 8)).dims
      ((1, 3), (4, 2))
    """
    part = part_shape(view, spec, shape)
    if part == shape or not prod(shape):
        return UNCUT
    return DeviceCut(spec, tuple((n // length, length) for n, length in zip(shape, part)))


def by_device(axes: tuple[str, ...], f: Function, in_specs: Any, out_specs: Any) -> Function:
    """Turns `f`, which each device of a replica calls with the parts that it holds, into a function of whole arrays.

    Args:
      axes: mesh axes along which the devices lie; the function is the same on all other devices.
      f: a function of one device.
      in_specs: a spec for each argument, or for each leaf of one.
      out_specs: likewise for the results.

    Returns:
      The function, for use inside a program of a replica.
    """
    if not axes:
        return f
    return over_axes(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
