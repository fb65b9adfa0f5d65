"""Classifies the results of equations on parts of arrays: parts, totals, or whole arrays.

Each replica holds a part of each array. An elementwise equation computes parts from parts. A sum
over an array is the sum of the replicas' sums. All other equations need the whole array. The
equations decide this; no optimizer declares anything.

Source: ZeRO (Rajbhandari et al., SC 2020), which assumes that updates are elementwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from fddp.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    contracted_dims,
    dims_of_reduction,
    permutes,
)
from fddp.jaxpr.equations import ELEMENTWISE, RESHAPES

SUMS = {"add", "add_any", "sub", "neg"}
# The operation that combines the replicas' results of a reduction over a whole array.
TOTALS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}


@dataclass(frozen=True)
class Same:
    """A value that is equal on all replicas."""

    uniform: bool = True
    """True if all its elements are equal: it can be broadcast to the shape of any part."""


@dataclass(frozen=True)
class Follows:
    """An array of a leaf, in parts of equal size on all replicas."""

    leaf: int


@dataclass(frozen=True)
class Total:
    """A number that the replicas combine: each has a summand, a maximum or a minimum."""

    op: str
    """"sum", "max" or "min"."""


@dataclass(frozen=True)
class Whole:
    """A value that needs whole arrays; arrays of a single leaf are gathered at the leaf's home."""

    leaves: frozenset[int]
    """The leaves of these arrays."""
    why: str
    """The equation that mixes their elements."""


Kind: TypeAlias = Same | Follows | Total | Whole


def constants(closed: ClosedJaxpr) -> dict[Var, Kind]:
    """The kinds of a program's constants."""
    return {var: Same(_uniform(value)) for var, value in zip(closed.jaxpr.constvars, closed.consts)}


def kind_of(kinds: Mapping[Var, Kind], atom: Var | Literal) -> Kind:
    """The kind of a variable or a literal."""
    return Same(np.size(atom.val) == 1) if isinstance(atom, Literal) else kinds[atom]


def made(eqn: JaxprEqn, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of an equation's results from those of its inputs.

    The equation is not one of `CALLS`, nor a conditional whose branches have kinds of their own.
    """
    total = _total(eqn, inputs)
    if total:
        return [total]
    inputs = [as_whole(kind) for kind in inputs]
    return [_one(eqn, inputs, var) for var in eqn.outvars]


def either(kinds: Sequence[Kind]) -> Kind:
    """Joins the kinds of a result in several branches."""
    leaves = source_leaves(kinds)
    mixed = next((kind for kind in kinds if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in kinds if isinstance(kind, Same))
    if len(leaves) == 1 and uniform:
        return Follows(*leaves)
    return Whole(leaves, "a branch") if leaves else Same(uniform)


def awaits(eqn: JaxprEqn, inputs: Sequence[Kind]) -> list[int]:
    """Positions of the inputs that the replicas must combine before an equation runs."""
    if _total(eqn, inputs):
        return []
    return [position for position, kind in enumerate(inputs) if isinstance(kind, Total)]


def as_whole(kind: Kind) -> Kind:
    """The kind of a value after the replicas have combined it."""
    return Same() if isinstance(kind, Total) else kind


def source_leaves(kinds: Sequence[Kind]) -> frozenset[int]:
    """The leaves of some kinds."""
    mixed = (kind.leaves for kind in kinds if isinstance(kind, Whole))
    return frozenset(kind.leaf for kind in kinds if isinstance(kind, Follows)).union(*mixed)


def _one(eqn: JaxprEqn, inputs: Sequence[Kind], result: Var) -> Kind:
    name = eqn.primitive.name
    leaves = source_leaves(inputs)
    mixed = next((kind for kind in inputs if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in inputs if isinstance(kind, Same))
    if not leaves:
        spreads = name in ELEMENTWISE | RESHAPES | {"broadcast_in_dim"} | set(TOTALS)
        return Same(prod(_shape(result)) == 1 or (uniform and spreads))
    if len(leaves) > 1 or not uniform:
        return Whole(leaves, f"{name} of several leaves" if len(leaves) > 1 else name)
    first = _shape(eqn.invars[0])
    out = _shape(result)
    # An operand of another shape is broadcast, for which a part is not enough.
    alike = all(
        _shape(atom) == out for atom, kind in zip(eqn.invars, inputs) if isinstance(kind, Follows)
    )
    keeps = name in RESHAPES and not permutes(eqn)
    if (
        keeps
        or (name == "broadcast_in_dim" and prod(out) == prod(first))
        or (name in ELEMENTWISE and alike)
    ):
        return Follows(*leaves)
    if name in TOTALS and _is_total(eqn):
        return Total(TOTALS[name])
    if (
        name == "dot_general"
        and all(len(_shape(x)) == 1 for x in eqn.invars)
        and contracted_dims(eqn) == (0,)
    ):
        return Total("sum")
    return Whole(leaves, name)


def _is_total(eqn: JaxprEqn) -> bool:
    """Returns True if a reduction covers all elements, and the replicas can combine results."""
    name = eqn.primitive.name
    form = eqn.invars[0]
    dims = dims_of_reduction(eqn)
    of_bools = jnp.issubdtype(_dtype(form), jnp.bool_)  # "and" and "or" of integers are bitwise
    fits = name == "reduce_sum" or (name in {"reduce_and", "reduce_or"}) == of_bools
    return fits and all(size == 1 for dim, size in enumerate(_shape(form)) if dim not in dims)


def _total(eqn: JaxprEqn, inputs: Sequence[Kind]) -> Total | None:
    """The kind of an equation's result if each replica can apply it to its summands; else None."""
    # Python's `sum` starts with 0, which does not count.
    inputs = [
        kind
        for kind, atom in zip(inputs, eqn.invars)
        if not (_zero(atom) and eqn.primitive.name in SUMS)
    ]
    name = eqn.primitive.name
    totals = [kind for kind in inputs if isinstance(kind, Total)]
    numbers = prod(_shape(eqn.outvars[0])) == 1 and all(
        isinstance(kind, Total | Same) for kind in inputs
    )
    if not totals or not numbers:
        return None
    if name == "copy" or (name in RESHAPES and not permutes(eqn)):
        return totals[0]
    alike = all(kind == Total("sum") for kind in totals)
    if name in SUMS and alike and len(totals) == len(inputs):
        return totals[0]
    # A division of integers rounds.
    divides = (
        name == "div"
        and isinstance(inputs[0], Total)
        and jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
    )
    return totals[0] if alike and (name == "mul" or divides) and len(totals) == 1 else None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _zero(atom: Var | Literal) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def _uniform(value: ArrayLike) -> bool:
    """Returns True if all elements of a constant are known to be equal."""
    return np.size(value) <= 1 or (
        isinstance(value, np.ndarray) and bool(np.all(value == value.flat[0]))
    )
