"""Runs a program of whole arrays on parts of them.

The program's constants are those of whole arrays, such as the divisor of a mean. Each replica
applies elementwise equations to its parts, which have the same layout for all arrays of a leaf and
may be padded. Sums are taken over all replicas. An equation that needs a whole leaf runs on a
single replica, the leaf's owner.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import CALLS, ClosedJaxpr, Var, branches, of_a_vector, run_again
from fddp.jaxpr.equations import ELEMENTWISE, form_of, straighten, variables
from fddp.jaxpr.interpreter import Values
from fddp.jaxpr.part_kinds import Follows, Kind, Total, Whole, kinds_of, source_leaves
from fddp.jaxpr.part_passes import LeafWork, OnParts, by_op, passes

# (work on a whole leaf, its whole inputs) → its whole outputs
RunWhole: TypeAlias = Callable[[LeafWork, Sequence[Array]], Sequence[Array]]


class Ranks(NamedTuple):
    """The layout of a replica's parts, and its collectives."""

    there: Callable[[int, int], Bool[Array, " *part"]]
    """(leaf, size of an array of the leaf) → mask of this replica's part, False for padding."""
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]
    """(op, this replica's numbers) → all replicas' numbers combined by "sum", "max" or "min"."""
    at_owners: Callable[[Sequence[LeafWork], Sequence[Sequence[Array]], RunWhole], Any]
    """Runs the work on each leaf at its owner, from this replica's parts of its inputs → a list of
    this replica's parts of its outputs, padded with zeros; of a number, its summand."""


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
    for kind in kinds_of(var_kinds, jaxpr.outvars):
        if isinstance(kind, Whole):
            raise ValueError(f"{kind.why} needs whole arrays.")

    def combine(op: str, totals: Sequence[Var]) -> None:
        values.update(zip(totals, ranks.put_together(op, values.read_all(totals))))

    for steps, numbers, works in part_passes:
        for step in steps:
            outputs = _apply(step, values.read_all(step.eqn.invars), ranks)
            values.update(zip(step.eqn.outvars, outputs))
        for op, totals in numbers.items():
            combine(op, totals)
        if works:
            local_parts = [values.read_all(work.inputs) for work in works]
            outputs = ranks.at_owners(works, local_parts, partial(_run_whole, program, values))
            for work, arrays in zip(works, outputs):
                values.update(zip(work.outputs, arrays))
    results = dict.fromkeys(variables(jaxpr.outvars))
    for op, totals in by_op(results, var_kinds).items():
        combine(op, totals)
    return values.outputs()


def _run_whole(
    program: ClosedJaxpr, values: Values, work: LeafWork, arrays: Sequence[Array]
) -> list[Array]:
    whole_values = Values(program, ())
    whole_values.update(values)
    whole_values.update(zip(work.inputs, arrays))
    whole_values.run(work.eqns)
    return whole_values.read_all(work.outputs)


def _apply(step: OnParts, arguments: Sequence[Any], ranks: Ranks) -> Sequence[Any]:
    """Applies an equation to parts."""
    eqn, inputs, results = step
    name = eqn.primitive.name
    part = next((x for kind, x in zip(inputs, arguments) if isinstance(kind, Follows)), None)
    if part is None:
        return run_again(eqn, arguments)
    if name == "cond":
        calls = [partial(_branch, branch, inputs[1:], results, ranks) for branch in branches(eqn)]
        return jax.lax.switch(arguments[0], calls, *arguments[1:])
    if isinstance(results[0], Total):
        neutral = _neutral(name, part.dtype)
        (leaf,) = source_leaves(inputs)
        mask = ranks.there(leaf, form_of(eqn.invars[0]).size)
        full = [jnp.where(mask, spread(x, part.shape), neutral).reshape(-1) for x in arguments]
        (output,) = run_again(eqn if name == "dot_general" else of_a_vector(eqn), full)
        return [output.reshape(form_of(eqn.outvars[0]).shape)]
    if name not in ELEMENTWISE:  # it only changes the shape
        return [part]
    return run_again(eqn, [spread(x, part.shape) for x in arguments])


def _neutral(name: str, dtype: Any) -> Array:
    """The neutral element of a reduction, in place of padding."""
    extremes = {"reduce_max": "min", "reduce_min": "max"}
    if name in extremes and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(getattr(jnp.iinfo(dtype), extremes[name]), dtype)
    neutral = {"reduce_max": -jnp.inf, "reduce_min": jnp.inf, "reduce_and": True}
    return jnp.asarray(neutral.get(name, 0), dtype)


def _branch(
    branch: ClosedJaxpr,
    inputs: Sequence[Kind],
    results: Sequence[Kind],
    ranks: Ranks,
    *arguments: Array,
) -> list[Any]:
    outputs = _run(straighten(branch, CALLS), inputs, arguments, ranks)
    # A result that is equal on all replicas in a branch may be a part in another branch.
    for k, (kind, var) in enumerate(zip(results, branch.jaxpr.outvars)):
        if isinstance(kind, Follows):
            part = ranks.there(kind.leaf, form_of(var).size)
            outputs[k] = spread(outputs[k], part.shape)
    return outputs


def spread(x: Any, shape: tuple[int, ...]) -> Array:
    """Broadcasts a number, or an array of equal numbers, to a part; a part is unchanged."""
    if jnp.shape(x) == shape:
        return x
    if not jnp.size(x):
        return jnp.zeros(shape, jnp.result_type(x))
    return jnp.broadcast_to(jnp.ravel(x)[0], shape)
