"""Runs a program of whole arrays on parts of them.

The constants in the program are those of whole arrays (the size that a mean divides by, say). Each rank applies its
elementwise equations to parts, which lie alike for all arrays of a leaf and may be padded. Sums are made over all
ranks. An equation that needs a leaf whole runs on one rank, the leaf's home.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import CALLS, ClosedJaxpr, Literal, Var, branches, of_a_vector, run_again
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import ELEMENTWISE, Follows, Kind, Total, Whole, kind_of, leaves_of
from fddp.jaxpr.part_passes import OnParts, Visit, passes

# The neutral element of each reduction, which takes the place of padding.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
    "reduce_min": lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


class AtHome(NamedTuple):
    """The work on one leaf at its home, as a function of whole arrays."""

    leaf: int
    """Number of the leaf."""
    parts: Sequence[Array]
    """This rank's parts of the function's arguments."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the whole arguments."""
    run: Callable[[Sequence[Array]], Sequence[Array]]
    """The function: whole arguments → whole results."""
    forms: Sequence[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the whole results."""


class Ranks(NamedTuple):
    """The parts of a rank, and its collectives with the others."""

    there: Callable[[int, int], Bool[Array, " *part"]]
    """(leaf, size of an array of it) → a mask of this rank's part, false where it is padding."""
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]
    """(op, this rank's numbers) → the numbers of all ranks, joined; op is "sum", "max" or "min"."""
    at_home: Callable[[Sequence[AtHome]], Sequence[Sequence[Array]]]
    """Calls each of these functions on one rank, a leaf's always on the same one → this rank's parts of the results of
    each, padded with zeros."""


def on_parts(closed: ClosedJaxpr, inputs: Sequence[Kind], ranks: Ranks) -> Callable[..., list[Any]]:
    """Makes a function that runs a program on one rank's parts.

    Args:
      closed: a program of whole arrays.
      inputs: the kind of each of its arguments, none of them `Whole` or `Total`.
      ranks: the collectives of a rank; they are called as rarely as the program allows.

    Returns:
      A function of the arguments that returns the results; arguments and results that follow a leaf are parts.

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

    parts = [values[var] for var in visit.takes]
    shapes = [_form(var).shape for var in visit.takes]
    return AtHome(visit.leaf, parts, shapes, run, [_form(var) for var in visit.brings])


def _form(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _number_or_part(var: Any, part: Array) -> Array:
    """Gives what came back from home its form: a part stays one, a number is this rank's summand."""
    shape = var.aval.shape
    return part.reshape(shape) if prod(shape) == 1 else part


def _apply(step: OnParts, arguments: Sequence[Any], ranks: Ranks) -> Sequence[Any]:
    """Applies one equation to parts."""
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
        (leaf,) = leaves_of(given)
        there = ranks.there(leaf, prod(_form(eqn.invars[0]).shape))
        full = [jnp.where(there, spread(x, part.shape), neutral).reshape(-1) for x in arguments]
        made = run_again(eqn if name == "dot_general" else of_a_vector(eqn), full)
        return [made.reshape(_form(eqn.outvars[0]).shape)]
    if name not in ELEMENTWISE:  # it only changes the shape
        return [part]
    alike = [spread(x, part.shape) for x in arguments]
    return [run_again(eqn, alike)]


def _branch(
    branch: ClosedJaxpr,
    given: Sequence[Kind],
    results: Sequence[Kind],
    ranks: Ranks,
    *arguments: Any,
) -> list[Any]:
    made = zip(results, _run(straighten(branch, CALLS), given, arguments, ranks), branch.jaxpr.outvars)
    # A result that is equal everywhere in one branch may be a part in another.
    return [
        spread(x, ranks.there(kind.leaf, prod(_form(var).shape)).shape) if isinstance(kind, Follows) else x
        for kind, x, var in made
    ]


def spread(x: Any, shape: tuple[int, ...]) -> Array:
    """Repeats a number, or one of an array's equal numbers, to the size of a part; a part stays as it is."""
    if jnp.shape(x) == shape:
        return x
    return jnp.broadcast_to(jnp.ravel(x)[0], shape) if jnp.size(x) else jnp.zeros(shape, jnp.result_type(x))
