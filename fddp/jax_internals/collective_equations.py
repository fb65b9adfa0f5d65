"""Collectives as equations: their names, their axes and their other parameters."""

import re
from typing import Any

from fddp.jax_internals.jaxprs import JaxprEqn

COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pgather", "pbroadcast"),
    *("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "ragged_all_to_all"),
}
# It sends nothing, but it needs an axis.
INDEX = "axis_index"


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
    if isinstance(axes, tuple | list):
        return tuple(axes)
    return (axes,)


def sets_of(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...] | None:
    """Returns the sets of replicas of a collective; None: all replicas are one set.

    Relies on `axis_index_groups`.
    """
    sets = eqn.params.get("axis_index_groups")
    if sets is None:
        return None
    return tuple(map(tuple, sets))


def gathered_dim(eqn: JaxprEqn) -> tuple[int, bool]:
    """Returns the dim along which an `all_gather` joins, and False if this dim is new.

    Relies on `all_gather_dimension` and `tiled`.
    """
    return eqn.params["all_gather_dimension"], eqn.params["tiled"]


def scattered_dim(eqn: JaxprEqn) -> tuple[int, bool]:
    """Returns the dim along which a `reduce_scatter` splits, and False if it drops this dim.

    Relies on `scatter_dimension` and `tiled`.
    """
    return eqn.params["scatter_dimension"], eqn.params["tiled"]


def exchanged_dims(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the dims along which an `all_to_all` splits and concatenates.

    Relies on `split_axis` and `concat_axis`.
    """
    return eqn.params["split_axis"], eqn.params["concat_axis"]


def ways_of(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Returns the pairs (source, target) of a `ppermute`. Relies on `perm`."""
    return [(source, target) for source, target in eqn.params["perm"]]
