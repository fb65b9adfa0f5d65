"""A program run on parts of arrays: what follows them element by element is made from the parts, sums over all ranks.

The program is that of whole arrays, with the constants in it (the size that a mean divides by, say); where it works
element by element it is applied to parts, which are flat and may be padded; what needs a leaf whole, at its home.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import CALLS, ClosedJaxpr, Literal, Var, branches, of_a_vector, run_again
from fddp.jaxpr.elements import ELEMENTWISE, Follows, Kind, Total, Whole, kind_of
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.passes import OnParts, Visit, passes

# What of a sum, a maximum or a minimum an element is that is not there.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
    "reduce_min": lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


class AtHome(NamedTuple):
    """What one leaf goes home for, as a function of whole arrays."""

    leaf: int
    parts: Sequence[Array]
    """This rank's parts of its arguments."""
    shapes: Sequence[tuple[int, ...]]
    """Those of the whole arguments."""
    run: Callable[[Sequence[Array]], Sequence[Array]]
    forms: Sequence[jax.ShapeDtypeStruct]
    """Those of the whole results."""


class Ranks(NamedTuple):
    """What a rank knows of its parts, and how it talks to the others."""

    there: Callable[[int], Bool[Array, " n"]]
    """Size of an array → which elements of this rank's part are of the array, and no padding."""
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]
    """(op, numbers of this rank) → of all ranks; op is "sum", "max" or "min"."""
    at_home: Callable[[Sequence[AtHome]], Sequence[Sequence[Array]]]
    """Calls each of these functions on one rank, the same one for a leaf each time → this rank's parts of what each of
    them has made, filled up with zeros."""


def on_parts(closed: ClosedJaxpr, inputs: Sequence[Kind], ranks: Ranks) -> Callable[..., list[Any]]:
    """Makes a function that runs a program on one rank's parts.

    Args:
      closed: a program of whole arrays.
      inputs: what each of its arguments is, none of them `Whole` or `Total`.
      ranks: how a rank talks to the others, which it does as rarely as the program allows.

    Returns:
      A function of the arguments, flat parts for those that follow a leaf; it returns the results, flat parts likewise.

    Raises:
      ValueError: a result needs whole arrays of several leaves; raised where the function is called.
    """
    program = straighten(closed, CALLS)
    return lambda *arguments: _run(program, inputs, arguments, ranks)


def _run(program: ClosedJaxpr, inputs: Sequence[Kind], arguments: Sequence[Any], ranks: Ranks) -> list[Any]:
    jaxpr = program.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.invars, arguments)) | dict(zip(jaxpr.constvars, program.consts))
    done, found = passes(program, inputs)
    results = [(atom, kind_of(found, atom)) for atom in jaxpr.outvars]
    for _, kind in results:
        if isinstance(kind, Whole):
            raise ValueError(f"{kind.why} needs whole arrays.")

    def combine(numbers: Mapping[str, Sequence[Var]]) -> None:
        for op, some in numbers.items():
            values.update(zip(some, ranks.put_together(op, [values[var] for var in some])))

    for parts, numbers, visits in done:
        for step in parts:
            values.update(zip(step.eqn.outvars, _apply(step, _values(step.eqn.invars, values), ranks)))
        combine(numbers)
        if visits:
            back = ranks.at_home([_at_home(visit, values) for visit in visits])
            for visit, made in zip(visits, back):
                values.update((var, _number_or_part(var, x)) for var, x in zip(visit.brings, made))
    ops = sorted({kind.op for _, kind in results if isinstance(kind, Total)})
    combine({op: list(dict.fromkeys(var for var, kind in results if kind == Total(op))) for op in ops})
    return [_array(x) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


def _values(atoms: Sequence[Any], values: Mapping[Var, Any]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def _array(literal: Any) -> Array:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _at_home(visit: Visit, values: Mapping[Var, Any]) -> AtHome:
    def run(arrays: Sequence[Array]) -> list[Array]:
        here = {**values, **dict(zip(visit.takes, arrays))}
        for eqn in visit.eqns:
            made = run_again(eqn, _values(eqn.invars, here))
            here.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made]))
        return [here[var] for var in visit.brings]

    parts, shapes = [values[var] for var in visit.takes], [_form(var).shape for var in visit.takes]
    return AtHome(visit.leaf, parts, shapes, run, [_form(var) for var in visit.brings])


def _form(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _number_or_part(var: Any, part: Array) -> Array:
    """The part of a number is this rank's summand."""
    shape = var.aval.shape
    return part.reshape(shape) if prod(shape) == 1 else part


def _apply(step: OnParts, arguments: Sequence[Any], ranks: Ranks) -> Sequence[Any]:
    """What one equation makes of parts."""
    eqn, given, results = step
    name = eqn.primitive.name
    parts = [x for kind, x in zip(given, arguments) if isinstance(kind, Follows)]
    if not parts:
        made = run_again(eqn, arguments)
        return made if eqn.primitive.multiple_results else [made]
    if name == "cond":
        each = [partial(_branch, branch, given[1:], results, ranks) for branch in branches(eqn)]
        return jax.lax.switch(arguments[0], each, *arguments[1:])
    part = parts[0]
    if isinstance(results[0], Total):
        neutral = jnp.asarray(NEUTRAL[name](part.dtype) if name in NEUTRAL else 0, part.dtype)
        there = ranks.there(prod(_form(eqn.invars[0]).shape))
        full = [jnp.where(there, spread(x, part.shape), neutral) for x in arguments]
        made = run_again(eqn if name == "dot_general" else of_a_vector(eqn), full)
        return [made.reshape(_form(eqn.outvars[0]).shape)]
    if name not in ELEMENTWISE:  # the same elements in another shape
        return [part]
    flat = [spread(x, part.shape) for x in arguments]
    return [run_again(eqn, flat)]


def _branch(
    branch: ClosedJaxpr,
    given: Sequence[Kind],
    results: Sequence[Kind],
    ranks: Ranks,
    *arguments: Any,
) -> list[Any]:
    made = zip(results, _run(straighten(branch, CALLS), given, arguments, ranks), branch.jaxpr.outvars)
    # What is equal everywhere in one branch may be a part in another.
    return [
        spread(x, ranks.there(prod(_form(var).shape)).shape) if isinstance(kind, Follows) else x
        for kind, x, var in made
    ]


def spread(x: Any, shape: tuple[int, ...]) -> Array:
    """A number, or an array of equal ones, in the size of a part, which stays as it is."""
    if jnp.shape(x) == shape:
        return x
    return jnp.broadcast_to(jnp.ravel(x)[0], shape) if jnp.size(x) else jnp.zeros(shape, jnp.result_type(x))
