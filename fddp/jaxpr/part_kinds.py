"""The results of an equation on parts of arrays: parts again, a summand of a total, or none, as it needs whole arrays.

Each rank holds a part of each array. An elementwise equation makes parts from parts. A sum over an array is made from
the ranks' sums. All other equations need the whole array. The equations themselves tell; no optimizer has to declare
what it does.

Source: ZeRO (Rajbhandari et al., SC 2020), which takes it for granted that updates are elementwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from fddp.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    contracted_dims,
    dims_of_reduction,
    permutes,
)

ELEMENTWISE = {
    *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2", "nextafter", "select_n", "clamp"),
    *("and", "or", "not", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count"),
    *("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "neg", "sign", "abs", "square", "integer_pow", "sqrt", "rsqrt"),
    *("cbrt", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
    *("floor", "ceil", "round", "real", "imag", "conj", "complex", "convert_element_type", "reduce_precision", "copy"),
}
# These keep the elements and their order, and change the dims, or only say where an array is to lie.
RESHAPES = {"reshape", "squeeze", "expand_dims", "sharding_constraint"}
SUMS = {"add", "add_any", "sub", "neg"}
# The operation that joins the ranks' results of a reduction over all of an array.
TOTALS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_and": "min", "reduce_or": "max"}


@dataclass(frozen=True)
class Same:
    """A value that is equal on all ranks, whatever part of the arrays each holds."""

    uniform: bool = True
    """Whether all of its elements are equal, so that it can be made in any size."""


@dataclass(frozen=True)
class Follows:
    """An array of one leaf that lies in parts, of equal size on all ranks."""

    leaf: int


@dataclass(frozen=True)
class Total:
    """A number of which each rank has a summand (or a maximum, a minimum) until the ranks join them."""

    op: str
    """"sum", "max" or "min"."""


@dataclass(frozen=True)
class Whole:
    """A value that needs whole arrays; where these are of one leaf, that leaf's owner rank ("home") makes it."""

    leaves: frozenset[int]
    """The leaves of these arrays."""
    why: str
    """The equation that mixes their elements."""


Kind: TypeAlias = Same | Follows | Total | Whole


def constants(closed: ClosedJaxpr) -> dict[Var, Kind]:
    """Finds the kind of each constant of a program."""
    return {var: Same(_uniform(value)) for var, value in zip(closed.jaxpr.constvars, closed.consts)}


def kind_of(found: Mapping[Var, Kind], atom: Any) -> Kind:
    """Finds the kind of a variable or a literal."""
    return Same(np.size(atom.val) == 1) if isinstance(atom, Literal) else found[atom]


def made(eqn: JaxprEqn, given: Sequence[Kind]) -> list[Kind]:
    """Finds the kinds of an equation's results.

    Args:
      eqn: the equation; none of `CALLS`, and no conditional whose branches can be looked into.
      given: the kind of each of its arguments.

    Returns:
      A kind for each of its results.
    """
    total = _total(eqn, given)
    if total:
        return [total]
    given = [whole(kind) for kind in given]
    return [_one(eqn, given, var) for var in eqn.outvars]


def either(kinds: Sequence[Kind]) -> Kind:
    """Joins the kinds that one result has in several branches."""
    leaves = leaves_of(kinds)
    mixed = next((kind for kind in kinds if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in kinds if isinstance(kind, Same))
    if len(leaves) == 1 and uniform:
        return Follows(*leaves)
    return Whole(leaves, "a branch") if leaves else Same(uniform)


def awaits(eqn: JaxprEqn, given: Sequence[Kind]) -> list[int]:
    """Finds the totals that the ranks must join before an equation can be applied.

    Args:
      eqn: the equation.
      given: the kind of each of its arguments.

    Returns:
      The places of these totals among the arguments.
    """
    if _total(eqn, given):
        return []
    return [place for place, kind in enumerate(given) if isinstance(kind, Total)]


def whole(kind: Kind) -> Kind:
    """The kind of a value after the ranks have joined it."""
    return Same() if isinstance(kind, Total) else kind


def leaves_of(given: Sequence[Kind]) -> frozenset[int]:
    """The leaves whose arrays these kinds are made of."""
    several = (kind.leaves for kind in given if isinstance(kind, Whole))
    return frozenset(kind.leaf for kind in given if isinstance(kind, Follows)).union(*several)


def _one(eqn: JaxprEqn, given: Sequence[Kind], result: Var) -> Kind:
    name = eqn.primitive.name
    leaves = leaves_of(given)
    mixed = next((kind for kind in given if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in given if isinstance(kind, Same))
    if not leaves:
        spreads = name in ELEMENTWISE | RESHAPES | {"broadcast_in_dim"} | set(TOTALS)
        return Same(prod(_shape(result)) == 1 or (uniform and spreads))
    if len(leaves) > 1 or not uniform:
        return Whole(leaves, f"{name} of several leaves" if len(leaves) > 1 else name)
    first = _shape(eqn.invars[0])
    out = _shape(result)
    # An operand of another shape is broadcast; from a part of it alone that cannot be done.
    alike = all(_shape(atom) == out for atom, kind in zip(eqn.invars, given) if isinstance(kind, Follows))
    keeps = name in RESHAPES and not permutes(eqn)
    if keeps or (name == "broadcast_in_dim" and prod(out) == prod(first)) or (name in ELEMENTWISE and alike):
        return Follows(*leaves)
    if name in TOTALS and _is_total(eqn):
        return Total(TOTALS[name])
    if name == "dot_general" and all(len(_shape(x)) == 1 for x in eqn.invars) and contracted_dims(eqn) == (0,):
        return Total("sum")
    return Whole(leaves, name)


def _is_total(eqn: JaxprEqn) -> bool:
    """Whether a reduction is over all elements, and the ranks can join their results."""
    name = eqn.primitive.name
    form = eqn.invars[0]
    dims = dims_of_reduction(eqn)
    of_bools = jnp.issubdtype(_dtype(form), jnp.bool_)  # "and" and "or" of integers work on their bits
    fits = name == "reduce_sum" or (name in {"reduce_and", "reduce_or"}) == of_bools
    return fits and all(size == 1 for dim, size in enumerate(_shape(form)) if dim not in dims)


def _total(eqn: JaxprEqn, given: Sequence[Kind]) -> Total | None:
    """The kind of an equation's result, if each rank can apply it to its own summands; else None."""
    # Python's `sum` begins with 0, which is no summand.
    given = [kind for kind, atom in zip(given, eqn.invars) if not (_zero(atom) and eqn.primitive.name in SUMS)]
    name = eqn.primitive.name
    totals = [kind for kind in given if isinstance(kind, Total)]
    numbers = prod(_shape(eqn.outvars[0])) == 1 and all(isinstance(kind, Total | Same) for kind in given)
    if not totals or not numbers:
        return None
    if name == "copy" or (name in RESHAPES and not permutes(eqn)):
        return totals[0]
    alike = all(kind == Total("sum") for kind in totals)
    if name in SUMS and alike and len(totals) == len(given):
        return totals[0]
    # A division of integers rounds.
    divides = name == "div" and isinstance(given[0], Total) and jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
    return totals[0] if alike and (name == "mul" or divides) and len(totals) == 1 else None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def _uniform(value: Any) -> bool:
    """Whether all elements of a constant are known to be equal."""
    return np.size(value) <= 1 or (isinstance(value, np.ndarray) and bool(np.all(value == value.flat[0])))
