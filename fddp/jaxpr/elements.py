"""What an equation makes of parts of arrays: parts again, its part of a sum, or nothing, as it needs whole arrays.

Where each rank holds a part of each array, what goes element by element is made from the parts, a sum over an array
from the ranks' sums, and all else needs the whole array. That is found in the equations; no optimizer is asked what it
is.

Source: ZeRO (Rajbhandari et al., SC 2020), which takes it for granted.
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
# They keep the elements and their order, and change the dims.
RESHAPES = {"reshape", "squeeze", "expand_dims"}
SUMS = {"add", "add_any", "sub", "neg"}
# How the ranks' results of a reduction over all of an array are put together.
TOTALS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_and": "min", "reduce_or": "max"}


@dataclass(frozen=True)
class Same:
    """Equal on all ranks, whatever part of the arrays each holds."""

    uniform: bool = True
    """Whether all of its elements are equal, so that it can be made in any size."""


@dataclass(frozen=True)
class Follows:
    """An array of one leaf that lies in parts, flat, each rank's as large as the others'."""

    leaf: int


@dataclass(frozen=True)
class Total:
    """A number that is not whole before the ranks' parts of it are put together."""

    op: str
    """"sum", "max" or "min"."""


@dataclass(frozen=True)
class Whole:
    """It needs whole arrays; where these are of one leaf, it is made at the home of that leaf."""

    leaves: frozenset[int]
    why: str
    """The equation that mixes their elements."""


Kind: TypeAlias = Same | Follows | Total | Whole


def constants(closed: ClosedJaxpr) -> dict[Var, Kind]:
    """What the constants of a program are."""
    return {var: Same(_uniform(value)) for var, value in zip(closed.jaxpr.constvars, closed.consts)}


def kind_of(found: Mapping[Var, Kind], atom: Any) -> Kind:
    """What a variable or a literal is."""
    return Same(np.size(atom.val) == 1) if isinstance(atom, Literal) else found[atom]


def made(eqn: JaxprEqn, given: Sequence[Kind]) -> list[Kind]:
    """What an equation makes.

    Args:
      eqn: the equation, none of `CALLS`, and without branches that could be looked into.
      given: what each of its arguments is.

    Returns:
      One for each of its results.
    """
    total = _total(eqn, given)
    if total:
        return [total]
    given = [whole(kind) for kind in given]
    return [_one(eqn, given, var) for var in eqn.outvars]


def either(kinds: Sequence[Kind]) -> Kind:
    """What comes out of one of several branches."""
    leaves, mixed = leaves_of(kinds), next((kind for kind in kinds if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in kinds if isinstance(kind, Same))
    if len(leaves) == 1 and uniform:
        return Follows(*leaves)
    return Whole(leaves, "a branch") if leaves else Same(uniform)


def awaits(eqn: JaxprEqn, given: Sequence[Kind]) -> list[int]:
    """Which of its arguments an equation needs put together first.

    Args:
      eqn: the equation.
      given: what each of its arguments is.

    Returns:
      Their places.
    """
    if _total(eqn, given):
        return []
    return [place for place, kind in enumerate(given) if isinstance(kind, Total)]


def whole(kind: Kind) -> Kind:
    """What something is once the ranks have put it together."""
    return Same() if isinstance(kind, Total) else kind


def leaves_of(given: Sequence[Kind]) -> frozenset[int]:
    """The leaves whose arrays these are."""
    several = (kind.leaves for kind in given if isinstance(kind, Whole))
    return frozenset(kind.leaf for kind in given if isinstance(kind, Follows)).union(*several)


def _one(eqn: JaxprEqn, given: Sequence[Kind], result: Var) -> Kind:
    name, leaves = eqn.primitive.name, leaves_of(given)
    mixed = next((kind for kind in given if isinstance(kind, Whole)), None)
    if mixed:
        return Whole(leaves, mixed.why)
    uniform = all(kind.uniform for kind in given if isinstance(kind, Same))
    if not leaves:
        spreads = name in ELEMENTWISE | RESHAPES | {"broadcast_in_dim"} | set(TOTALS)
        return Same(prod(_shape(result)) == 1 or (uniform and spreads))
    if len(leaves) > 1 or not uniform:
        return Whole(leaves, f"{name} of several leaves" if len(leaves) > 1 else name)
    first, out = _shape(eqn.invars[0]), _shape(result)
    # An operand of another shape is repeated, which a part of it could not be.
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
    """Whether a reduction is over all elements, and the ranks' numbers can be put together."""
    name, form, dims = eqn.primitive.name, eqn.invars[0], dims_of_reduction(eqn)
    of_bools = jnp.issubdtype(_dtype(form), jnp.bool_)  # "and" and "or" of integers are of their bits
    fits = name == "reduce_sum" or (name in {"reduce_and", "reduce_or"}) == of_bools
    return fits and all(size == 1 for dim, size in enumerate(_shape(form)) if dim not in dims)


def _total(eqn: JaxprEqn, given: Sequence[Kind]) -> Total | None:
    """Whether an equation can be applied to each rank's part of a number."""
    # A sum that Python makes begins with 0.
    given = [kind for kind, atom in zip(given, eqn.invars) if not (_zero(atom) and eqn.primitive.name in SUMS)]
    name, totals = eqn.primitive.name, [kind for kind in given if isinstance(kind, Total)]
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
