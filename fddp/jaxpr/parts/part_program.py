"""Runs a program of whole arrays on parts of them.

The program's constants are those of whole arrays, such as the divisor of a mean. Each replica
applies elementwise equations to its parts, which have the same layout for all arrays of a leaf and
may be padded. Sums are taken over all replicas. An equation that needs a whole leaf runs on a
single replica, the leaf's home.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import CALLS, ClosedJaxpr, Literal, Var, branches, of_a_vector, run_again
from fddp.jaxpr.equations import ELEMENTWISE, straighten
from fddp.jaxpr.interpreter import Values
from fddp.jaxpr.parts.part_kinds import Follows, Kind, Total, Whole, kind_of, source_leaves
from fddp.jaxpr.parts.part_passes import OnParts, Visit, passes

# The neutral element of each reduction, in place of padding.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: (
        -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
    ),
    "reduce_min": lambda dtype: (
        jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max
    ),
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


class AtHome(NamedTuple):
    """Work on a leaf at its home, as a function of whole arrays."""

    leaf: int
    """Index of the leaf."""
    parts: Sequence[Array]
    """This replica's parts of the arguments."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the whole arguments."""
    run: Callable[[Sequence[Array]], Sequence[Array]]
    """Whole arguments → whole results."""
    forms: Sequence[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the whole results."""


class Ranks(NamedTuple):
    """The layout of a replica's parts, and its collectives."""

    there: Callable[[int, int], Bool[Array, " *part"]]
    """(leaf, size of an array of the leaf) → mask of this replica's part, False for padding."""
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]
    """(op, this replica's numbers) → all replicas' numbers combined by "sum", "max" or "min"."""
    at_home: Callable[[Sequence[AtHome]], Sequence[Sequence[Array]]]
    """Runs each function on its leaf's home → this replica's parts of its results, padded with
    zeros."""


def on_parts(closed: ClosedJaxpr, inputs: Sequence[Kind], ranks: Ranks) -> Callable[..., list[Any]]:
    """Returns a function that runs a program on a replica's parts.

    The inputs are `Follows` or `Same`. Arguments and results of kind `Follows` are parts. The
    function calls as few collectives as the program allows, and raises a ValueError if a result
    needs whole arrays of several leaves.
    """
    program = straighten(closed, CALLS)
    return lambda *arguments: _run(program, inputs, arguments, ranks)


def _run(
    program: ClosedJaxpr, inputs: Sequence[Kind], arguments: Sequence[Array], ranks: Ranks
) -> list[Any]:
    jaxpr = program.jaxpr
    values = Values(program, arguments)
    part_passes, var_kinds = passes(program, inputs)
    results = [(atom, kind_of(var_kinds, atom)) for atom in jaxpr.outvars]
    for _, kind in results:
        if isinstance(kind, Whole):
            raise ValueError(f"{kind.why} needs whole arrays.")

    def combine(numbers: Mapping[str, Sequence[Var]]) -> None:
        for op, totals in numbers.items():
            values.update(zip(totals, ranks.put_together(op, values.read_all(totals))))

    for steps, numbers, visits in part_passes:
        for step in steps:
            outputs = _apply(step, values.read_all(step.eqn.invars), ranks)
            values.update(zip(step.eqn.outvars, outputs))
        combine(numbers)
        if visits:
            scattered = ranks.at_home([_at_home(program, visit, values) for visit in visits])
            for visit, arrays in zip(visits, scattered):
                values.update(
                    (var, _number_or_part(var, x)) for var, x in zip(visit.brings, arrays)
                )
    ops = sorted({kind.op for _, kind in results if isinstance(kind, Total)})
    combine(
        {op: list(dict.fromkeys(var for var, kind in results if kind == Total(op))) for op in ops}
    )
    return [_array(x) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


def _array(literal: Any) -> Array:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _at_home(program: ClosedJaxpr, visit: Visit, values: Values) -> AtHome:
    def run(arrays: Sequence[Array]) -> list[Array]:
        whole_values = Values(program, ())
        whole_values.update(values)
        whole_values.update(zip(visit.takes, arrays))
        whole_values.run(visit.eqns)
        return whole_values.read_all(visit.brings)

    shapes = [_form(var).shape for var in visit.takes]
    forms = list(map(_form, visit.brings))
    return AtHome(visit.leaf, values.read_all(visit.takes), shapes, run, forms)


def _form(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _number_or_part(var: Any, part: Array) -> Array:
    """Reshapes a number from a leaf's home, this replica's summand; a part is unchanged."""
    shape = var.aval.shape
    return part.reshape(shape) if prod(shape) == 1 else part


def _apply(step: OnParts, arguments: Sequence[Any], ranks: Ranks) -> Sequence[Any]:
    """Applies an equation to parts."""
    eqn, inputs, results = step
    name = eqn.primitive.name
    operands = [x for kind, x in zip(inputs, arguments) if isinstance(kind, Follows)]
    if not operands:
        output = run_again(eqn, arguments)
        return output if eqn.primitive.multiple_results else [output]
    if name == "cond":
        calls = [partial(_branch, branch, inputs[1:], results, ranks) for branch in branches(eqn)]
        return jax.lax.switch(arguments[0], calls, *arguments[1:])
    part = operands[0]
    if isinstance(results[0], Total):
        neutral = jnp.asarray(NEUTRAL[name](part.dtype) if name in NEUTRAL else 0, part.dtype)
        (leaf,) = source_leaves(inputs)
        mask = ranks.there(leaf, prod(_form(eqn.invars[0]).shape))
        full = [jnp.where(mask, spread(x, part.shape), neutral).reshape(-1) for x in arguments]
        output = run_again(eqn if name == "dot_general" else of_a_vector(eqn), full)
        return [output.reshape(_form(eqn.outvars[0]).shape)]
    if name not in ELEMENTWISE:  # it only changes the shape
        return [part]
    alike = [spread(x, part.shape) for x in arguments]
    return [run_again(eqn, alike)]


def _branch(
    branch: ClosedJaxpr,
    inputs: Sequence[Kind],
    results: Sequence[Kind],
    ranks: Ranks,
    *arguments: Array,
) -> list[Any]:
    outputs = zip(
        results, _run(straighten(branch, CALLS), inputs, arguments, ranks), branch.jaxpr.outvars
    )
    # A result that is equal on all replicas in a branch may be a part in another branch.
    return [
        spread(x, ranks.there(kind.leaf, prod(_form(var).shape)).shape)
        if isinstance(kind, Follows)
        else x
        for kind, x, var in outputs
    ]


def spread(x: Any, shape: tuple[int, ...]) -> Array:
    """Broadcasts a number, or an array of equal numbers, to a part; a part is unchanged."""
    if jnp.shape(x) == shape:
        return x
    return (
        jnp.broadcast_to(jnp.ravel(x)[0], shape)
        if jnp.size(x)
        else jnp.zeros(shape, jnp.result_type(x))
    )
