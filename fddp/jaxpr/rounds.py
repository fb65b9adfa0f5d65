"""Finds what a program makes slice by slice, and what it can.

`lax.scan` over stacked layers makes the gradients of all layers at once, when the loop ends. A program that takes them
slice by slice can be written so that each slice is made by a shorter loop, of a few rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    along_first_dim,
    jaxpr_as_fun,
    joins_first_dim,
    loop_parts,
    scan_body,
)
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.flow import arrival, flow
from fddp.jaxpr.part_kinds import ELEMENTWISE

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each slice along the first dim, from 0 on; together they are the whole array."""


class Stack(NamedTuple):
    """An array that a loop makes, a slice in each round."""

    loop: int
    """The place of the loop in its program."""
    length: int
    """The number of its rounds."""


def stacks(closed: ClosedJaxpr) -> dict[int, Stack]:
    """Finds the outputs of a program that a scan makes slice by slice.

    Args:
      closed: the program.

    Returns:
      Number of such an output → the loop. What is added to the slices afterwards, or how they are scaled or cast, does
      not matter.

    Example:
      >>> def loss(layers, x):
      ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0])
      >>> program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 3, 3)), jnp.ones((2, 3)))
      >>> {number: stack.length for number, stack in stacks(program).items()}
      {0: 4}
    """
    jaxpr = straighten(closed).jaxpr
    of = _made_in_rounds(jaxpr)
    found = {number: of(atom) for number, atom in enumerate(jaxpr.outvars)}
    return {number: stack for number, stack in found.items() if stack}


def slices_made(closed: ClosedJaxpr, comes: Mapping[int, int]) -> dict[int, Bounds]:
    """Finds the outputs of a program that are made slice by slice, of inputs that come slice by slice.

    Args:
      closed: the program.
      comes: number of an input → when it comes.

    Returns:
      Number of such an output → its slices.
    """
    jaxpr = straighten(closed).jaxpr
    wanted = wanted_slices(jaxpr, arrival(jaxpr, comes), jaxpr.outvars)
    return {
        number: wanted[var]
        for number, var in enumerate(jaxpr.outvars)
        if not isinstance(var, Literal) and var in wanted and var not in jaxpr.invars
    }


def in_slices(
    closed: ClosedJaxpr, inputs: Mapping[int, Bounds], outputs: Mapping[int, Bounds]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """Gives a program slices in place of arrays, and takes slices of what it makes.

    Args:
      closed: the program.
      inputs: number of an input → the slices that are put together to it.
      outputs: number of an output → the slices that are taken of it.

    Returns:
      The function, to be traced, and the forms of its inputs; slices stand, in order, where arrays stood.

    Example:
      >>> program = jax.make_jaxpr(lambda x: (2 * x,))(jnp.arange(3.0))
      >>> run, forms = in_slices(program, {0: ((0, 1), (1, 3))}, {})
      >>> [form.shape for form in forms], run(jnp.zeros(1), jnp.ones(2))[0].tolist()
      ([(1,), (2,)], [0.0, 2.0, 2.0])
    """
    forms = list[list[jax.ShapeDtypeStruct]]()
    for number, x in enumerate(closed.in_avals):
        shapes = [(end - begin, *x.shape[1:]) for begin, end in inputs.get(number, ())] or [x.shape]
        forms.append([jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type) for shape in shapes])

    def run(*given: Any) -> list[Any]:
        left = iter(given)
        each = ([next(left) for _ in some] for some in forms)
        made = jaxpr_as_fun(closed)(*(some[0] if len(some) == 1 else jnp.concatenate(some) for some in each))
        taken = ([jax.lax.slice_in_dim(x, *one) for one in outputs.get(number, ())] for number, x in enumerate(made))
        return [y for x, some in zip(made, taken) for y in some or [x]]

    return run, [form for some in forms for form in some]


def _made_in_rounds(jaxpr: Jaxpr) -> Callable[[Any], Stack | None]:
    """Finds for a value the loop that makes it slice by slice."""
    places = {id(eqn): at for at, eqn in enumerate(jaxpr.eqns)}

    def made(eqn: JaxprEqn, given: list[Stack | None]) -> list[Stack | None]:
        if eqn.primitive.name == "scan":
            length = scan_body(eqn)[1]["length"]
            carried = len(loop_parts(eqn, eqn.invars)[1])
            rows = len(eqn.outvars) - carried
            return [None] * carried + [Stack(places[id(eqn)], length)] * rows
        if eqn.primitive.name not in ELEMENTWISE:
            return [None] * len(eqn.outvars)
        return [next((one for one, atom in zip(given, eqn.invars) if one and atom in with_slices(eqn)), None)]

    return flow(jaxpr, [None] * len(jaxpr.invars), made, lambda atom: None)


def wanted_slices(jaxpr: Jaxpr, when: Callable[[Any], int], outputs: Sequence[Any]) -> dict[Var, Bounds]:
    """Finds the values that are to be made slice by slice, and their slices.

    Args:
      jaxpr: the program.
      when: value → when it can be made.
      outputs: those that are of use slice by slice.

    Returns:
      Their slices.
    """
    in_rounds = _made_in_rounds(jaxpr)
    joined = {eqn.outvars[0]: joined_bounds(eqn) for eqn in jaxpr.eqns if joins_first_dim(eqn)}
    taken: dict[Var, set[tuple[int, int]]] = {}
    for eqn in jaxpr.eqns:
        part = along_first_dim(eqn)
        source = eqn.invars[0] if part else None
        if part and isinstance(source, Var) and (in_rounds(source) or part in joined.get(source, ())):
            taken.setdefault(source, set()).add(part)
    wanted = {var: bounds for var, parts in taken.items() if (bounds := _tiling(var, parts))}
    _spread_back(jaxpr, wanted)
    used = _used_in_slices(jaxpr).union(atom for atom in outputs if not isinstance(atom, Literal))
    for eqn in jaxpr.eqns:
        if joins_first_dim(eqn) and eqn.outvars[0] in used and all(map(when, eqn.invars)):
            wanted.setdefault(eqn.outvars[0], joined[eqn.outvars[0]])
        if eqn.primitive.name in ELEMENTWISE:
            for atom in with_slices(eqn):
                if atom in wanted:
                    wanted.setdefault(eqn.outvars[0], wanted[atom])
    _spread_back(jaxpr, wanted)
    return wanted


def _used_in_slices(jaxpr: Jaxpr) -> set[Var]:
    """The values that loops take row by row, or elementwise equations slice by slice."""
    loops = [loop_parts(eqn, eqn.invars)[2] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    others = [with_slices(eqn) for eqn in jaxpr.eqns if eqn.primitive.name in ELEMENTWISE]
    return {atom for some in [*loops, *others] for atom in some if not isinstance(atom, Literal)}


def _spread_back(jaxpr: Jaxpr, wanted: dict[Var, Bounds]) -> None:
    """Marks the inputs of elementwise equations whose results are wanted slice by slice."""
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in ELEMENTWISE and eqn.outvars[0] in wanted:
            for atom in with_slices(eqn):
                wanted.setdefault(atom, wanted[eqn.outvars[0]])


def joined_bounds(eqn: JaxprEqn) -> Bounds:
    """The slices of which an equation makes an array."""
    return tuple(pairwise(accumulate((form_of(atom)[0][0] for atom in eqn.invars), initial=0)))


def _tiling(var: Var, parts: set[tuple[int, int]]) -> Bounds | None:
    bounds = tuple(sorted(parts))
    ends = [0, *(end for _, end in bounds)]
    fit = len(bounds) > 1 and all(begin == end for (begin, _), end in zip(bounds, ends))
    return bounds if fit and ends[-1] == form_of(var)[0][0] else None


def with_slices(eqn: JaxprEqn) -> list[Var]:
    """The variables among an equation's inputs whose slices make slices of its result; others are read whole."""
    dims = form_of(eqn.outvars[0])[0]
    shapes = [(atom, form_of(atom)[0]) for atom in eqn.invars if not isinstance(atom, Literal)]
    return [atom for atom, shape in shapes if dims and len(shape) == len(dims) and shape[0] == dims[0]]


def form_of(atom: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype of a value."""
    return tuple(atom.aval.shape), atom.aval.dtype
