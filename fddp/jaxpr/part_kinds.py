"""Classifies the results of equations on parts of arrays: parts, totals, or whole arrays.

Each replica holds a part of each array. An elementwise equation computes parts from parts. A sum
over an array is the sum of the replicas' sums. All other equations need the whole array. The
equations decide this; no optimizer declares anything.

Source: ZeRO (Rajbhandari et al., SC 2020), which assumes that updates are elementwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

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
from fddp.jaxpr.equations import ELEMENTWISE, RESHAPES, form_of

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
    """A value that needs whole arrays; arrays of a single leaf are gathered at the leaf's owner."""

    leaves: frozenset[int]
    """The leaves of these arrays."""
    why: str
    """The equation that mixes their elements."""


Kind: TypeAlias = Same | Follows | Total | Whole


def constants(closed: ClosedJaxpr) -> dict[Var, Kind]:
    """The kinds of a program's constants."""
    return dict(zip(closed.jaxpr.constvars, map(Same, map(_uniform, closed.consts))))


def kinds_of(kinds: Mapping[Var, Kind], atoms: Iterable[Var | Literal]) -> list[Kind]:
    """The kinds of variables and literals."""
    return [Same(np.size(x.val) == 1) if isinstance(x, Literal) else kinds[x] for x in atoms]


def output_kinds(eqn: JaxprEqn, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of an equation's results from those of its inputs."""
    total = _total(eqn, inputs)
    if total:
        return [total]
    return list(map(partial(_kind, eqn, list(map(as_whole, inputs))), eqn.outvars))


def either(kinds: Sequence[Kind]) -> Kind:
    """Joins the kinds of a result in several branches."""
    leaves = source_leaves(kinds)
    if mixed := _first_whole(kinds):
        return Whole(leaves, mixed.why)
    uniform = _all_uniform(kinds)
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
    leaves = set[int]()
    for kind in kinds:
        if isinstance(kind, Whole):
            leaves |= kind.leaves
        elif isinstance(kind, Follows):
            leaves.add(kind.leaf)
    return frozenset(leaves)


def is_whole(kind: Kind) -> bool:
    """Returns True for a value that needs whole arrays."""
    return isinstance(kind, Whole)


def _first_whole(kinds: Iterable[Kind]) -> Whole | None:
    return next((kind for kind in kinds if isinstance(kind, Whole)), None)


def _all_uniform(kinds: Iterable[Kind]) -> bool:
    """Returns True if no value that is equal on all replicas has different elements."""
    return Same(uniform=False) not in kinds


def _kind(eqn: JaxprEqn, inputs: Sequence[Kind], result: Var) -> Kind:
    name = eqn.primitive.name
    leaves = source_leaves(inputs)
    if mixed := _first_whole(inputs):
        return Whole(leaves, mixed.why)
    uniform = _all_uniform(inputs)
    out = form_of(result).shape
    if not leaves:
        spreads = name in ELEMENTWISE | RESHAPES | {"broadcast_in_dim"} | set(TOTALS)
        return Same(prod(out) == 1 or (uniform and spreads))
    if len(leaves) > 1:
        return Whole(leaves, f"{name} of several leaves")
    if uniform and _keeps_parts(eqn, inputs, out):
        return Follows(*leaves)
    if uniform and name in TOTALS and _is_total(eqn):
        return Total(TOTALS[name])
    if uniform and name == "dot_general" and _is_dot(eqn):
        return Total("sum")
    return Whole(leaves, name)


def _keeps_parts(eqn: JaxprEqn, inputs: Sequence[Kind], out: tuple[int, ...]) -> bool:
    """Returns True if an equation computes a part of its result from parts of its inputs."""
    name = eqn.primitive.name
    if name in RESHAPES:
        return not permutes(eqn)
    if name == "broadcast_in_dim":
        return prod(out) == form_of(eqn.invars[0]).size
    # An operand of another shape is broadcast, for which a part is not enough.
    operands = (x for x, kind in zip(eqn.invars, inputs) if isinstance(kind, Follows))
    return name in ELEMENTWISE and all(form_of(x).shape == out for x in operands)


def _is_dot(eqn: JaxprEqn) -> bool:
    """Returns True for a product of two vectors."""
    return contracted_dims(eqn) == (0,) and all(x.ndim == 1 for x in map(form_of, eqn.invars))


def _is_total(eqn: JaxprEqn) -> bool:
    """Returns True if a reduction covers all elements, and the replicas can combine results."""
    name = eqn.primitive.name
    form = form_of(eqn.invars[0])
    of_bools = jnp.issubdtype(form.dtype, jnp.bool_)  # "and" and "or" of integers are bitwise
    if name != "reduce_sum" and (name in {"reduce_and", "reduce_or"}) != of_bools:
        return False
    dims = dims_of_reduction(eqn)
    return all(size == 1 for dim, size in enumerate(form.shape) if dim not in dims)


def _total(eqn: JaxprEqn, inputs: Sequence[Kind]) -> Total | None:
    """The kind of an equation's result if each replica can apply it to its summands; else None."""
    name = eqn.primitive.name
    if name in SUMS:  # Python's `sum` starts with 0, which does not count.
        inputs = [kind for kind, atom in zip(inputs, eqn.invars) if not _zero(atom)]
    totals = [kind for kind in inputs if isinstance(kind, Total)]
    same = [kind for kind in inputs if isinstance(kind, Same)]
    if not eqn.outvars or not totals or len(totals) + len(same) < len(inputs):
        return None
    result = form_of(eqn.outvars[0])
    if result.size != 1:
        return None
    if name == "copy" or (name in RESHAPES and not permutes(eqn)):
        return totals[0]
    if set(totals) != {Total("sum")}:
        return None
    if name in SUMS:
        return None if same else totals[0]
    # A division of integers rounds.
    divides = name == "div" and inputs[0] in totals and jnp.issubdtype(result.dtype, jnp.inexact)
    return totals[0] if len(totals) == 1 and (name == "mul" or divides) else None


def _zero(atom: Var | Literal) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def _uniform(value: ArrayLike) -> bool:
    """Returns True if all elements of a constant are known to be equal."""
    return np.size(value) <= 1 or (
        isinstance(value, np.ndarray) and bool(np.all(value == value.flat[0]))
    )
