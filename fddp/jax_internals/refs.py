"""Converts programs that write to Refs (`jax.new_ref`) to programs of values."""

from collections.abc import Sequence

from jax._src import core
from jax._src.state.discharge import discharge_state

from fddp.jax_internals.jaxprs import ClosedJaxpr, Jaxpr, inner_programs


def without_refs(closed: ClosedJaxpr, axes: Sequence[tuple[str, int]] = ()) -> ClosedJaxpr:
    """Replaces the `jax.new_ref`s of a program by values; `axes` are those of its collectives.

    A Ref that the program closes over, or makes inside an inner program, is a ValueError. Relies on
    `discharge_state` and `extend_axis_env_nd`.
    """
    if any(
        isinstance(getattr(var.aval, "inner_aval", None), core.AbstractValue)
        for var in closed.jaxpr.constvars
    ):
        raise ValueError(
            "a loss closes over a Ref (jax.new_ref): return its value as model_state or aux."
        )
    if not _makes_refs(closed.jaxpr):
        return closed
    with core.extend_axis_env_nd(axes):
        plain = discharge_state(closed)
    if _makes_refs(plain.jaxpr):
        raise ValueError(
            "a loss creates a Ref (jax.new_ref) inside a loop or a branch: create it outside."
        )
    return plain


def _makes_refs(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "new_ref" or any(map(_makes_refs, inner_programs(eqn)))
        for eqn in jaxpr.eqns
    )
