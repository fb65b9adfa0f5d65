"""Collectives as equations: their names, their axes and their other parameters."""

import re
from typing import Any

from fddp.jax_internals.jaxprs import JaxprEqn

COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pgather", "pbroadcast"),
    *("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "ragged_all_to_all"),
}
DIMS = {
    "all_gather": ("all_gather_dimension", "tiled"),
    "reduce_scatter": ("scatter_dimension", "tiled"),
    "all_to_all": ("split_axis", "concat_axis"),
}


def unbound_axis(error: NameError) -> str | None:
    """Returns the axis that a collective names and no program binds; None for another error.

    Relies on JAX's words.
    """
    found = re.search(r"unbound axis name: ([^.\s]+)", str(error))
    return found and found[1]


def axes_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the axes of a collective, after `vmap` also numbers of dims.

    Relies on `axes` and `axis_name`.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def sets_of(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...] | None:
    """Returns the sets of replicas of a collective; None: all replicas are one set.

    Relies on `axis_index_groups`.
    """
    sets = eqn.params.get("axis_index_groups")
    return None if sets is None else tuple(map(tuple, sets))


def dims_of(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns two parameters of a collective, which relies on their names in `DIMS`.

    Of an `all_gather` or a `reduce_scatter` these are the dim of the replicas, and False if only
    the gathered array has it. An `all_to_all` splits along the first dim and joins along the other.
    """
    first, second = DIMS[eqn.primitive.name]
    return eqn.params[first], eqn.params[second]


def ways_of(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Returns the pairs (source, target) of a `ppermute`. Relies on `perm`."""
    return eqn.params["perm"]
