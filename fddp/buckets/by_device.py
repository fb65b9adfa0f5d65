"""Functions of the tensor-parallel parts of arrays, one per device of a replica."""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import PyTree

from fddp.jax_internals import over_axes

Function = TypeVar("Function", bound=Callable[..., Any])


def by_device(axes: tuple[str, ...], f: Function, in_specs: PyTree, out_specs: PyTree) -> Function:
    """Turns `f`, which each device along `axes` runs on its parts, into a function of whole arrays.

    The specs of arguments and results are those of `jax.shard_map`. Without axes `f` is returned
    unchanged.
    """
    if not axes:
        return f
    return over_axes(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
