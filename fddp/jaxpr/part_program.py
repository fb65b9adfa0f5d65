"""Runs a program of whole arrays on parts of them.

The constants in the program are those of whole arrays (the size that a mean divides by, say). Each rank applies its
elementwise equations to parts, which are flat and may be padded. Sums are made over all ranks. What an equation needs
whole is gathered, and each rank applies that equation for itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import CALLS, ClosedJaxpr, Literal, Var, branches, of_a_vector, run_again
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import ELEMENTWISE, Follows, Kind, Total, Whole, kind_of
from fddp.jaxpr.part_passes import Step, by_op, passes

# The neutral element of each reduction, which takes the place of padding.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
    "reduce_min": lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


class Ranks(NamedTuple):
    """The parts of a rank, and its collectives with the others."""

    there: Callable[[int], Bool[Array, " n"]]
    """Size of an array → a mask of this rank's part, false where it is padding."""
    own: Callable[[Array], Array]
    """An array that is equal on all ranks → this rank's part."""
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]
    """(op, this rank's numbers) → the numbers of all ranks, joined; op is "sum", "max" or "min"."""
    gather: Callable[[Array, tuple[int, ...]], Array]
    """(this rank's part, shape of the whole array) → the whole array."""


def on_parts(
    closed: ClosedJaxpr, inputs: Sequence[Kind], outputs: Sequence[Kind], ranks: Ranks
) -> Callable[..., list[Any]]:
    """Makes a function that runs a program on one rank's parts.

    Args:
      closed: a program of whole arrays.
      inputs: the kind of each of its arguments, none of them a `Total`.
      outputs: the kind that each of its results is to have: `Follows` a part, any other the whole array.
      ranks: the collectives of a rank; they are called as rarely as the program allows.

    Returns:
      A function of the arguments that returns the results; arguments and results that follow a leaf are flat parts.
    """
    return partial(_run, straighten(closed, CALLS), inputs, outputs, ranks)


def _run(
    program: ClosedJaxpr, inputs: Sequence[Kind], outputs: Sequence[Kind], ranks: Ranks, *arguments: Any
) -> list[Any]:
    jaxpr = program.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.invars, arguments)) | dict(zip(jaxpr.constvars, program.consts))
    whole: dict[Var, Array] = {}  # of parts that are gathered
    done, found = passes(program, inputs)

    def exchange(totals: Mapping[str, Sequence[Var]], gathers: Iterable[Any]) -> None:
        for op, some in totals.items():
            values.update(zip(some, ranks.put_together(op, [values[var] for var in some])))
        whole.update((var, ranks.gather(values[var], var.aval.shape)) for var in gathers)

    def read(atom: Any, kind: Kind) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        return whole.get(atom, values[atom]) if isinstance(kind, Whole) else values[atom]

    for steps, totals, gathers in done:
        for step in steps:
            arguments = tuple(map(read, step.eqn.invars, step.given))
            values.update(zip(step.eqn.outvars, _apply(step, arguments, ranks)))
        exchange(totals, gathers)
    kinds = [kind_of(found, atom) for atom in jaxpr.outvars]
    results = list(zip(jaxpr.outvars, kinds, [isinstance(kind, Follows) for kind in outputs]))
    late = dict.fromkeys(var for var, kind, in_parts in results if isinstance(kind, Follows) and not in_parts)
    exchange(by_op(jaxpr.outvars, found), [var for var in late if var not in whole])

    def result(atom: Any, kind: Kind, in_parts: bool) -> Any:
        if isinstance(kind, Follows):
            return values[atom] if in_parts else whole[atom]
        made = _array(atom) if isinstance(atom, Literal) else values[atom]
        return ranks.own(made) if in_parts else made

    return [result(*one) for one in results]


def _apply(step: Step, arguments: Sequence[Any], ranks: Ranks) -> Sequence[Any]:
    """Applies one equation, to parts if it is given any."""
    eqn, given, makes = step
    name = eqn.primitive.name
    parts = [k for k, kind in enumerate(given) if isinstance(kind, Follows)]
    if not parts:
        made = run_again(eqn, arguments)
        return made if eqn.primitive.multiple_results else [made]
    if name == "cond":
        each = [partial(_run, straighten(branch, CALLS), given[1:], makes, ranks) for branch in branches(eqn)]
        return jax.lax.switch(arguments[0], each, *arguments[1:])
    part = arguments[parts[0]]
    shape = _shape(eqn.invars[parts[0]])
    total = isinstance(makes[0], Total)
    if not total and name not in ELEMENTWISE:  # it only changes the shape
        return [part]
    flat = [x if k in parts else _own(x, shape, part.size, ranks) for k, x in enumerate(arguments)]
    if not total:
        return [run_again(eqn, flat)]
    neutral = jnp.asarray(NEUTRAL[name](part.dtype) if name in NEUTRAL else 0, part.dtype)
    full = [jnp.where(ranks.there(prod(shape)), x, neutral) for x in flat]
    made = run_again(eqn if name == "dot_general" else of_a_vector(eqn), full)
    return [made.reshape(_shape(eqn.outvars[0]))]


def _own(x: Any, shape: tuple[int, ...], size: int, ranks: Ranks) -> Array:
    """This rank's part, of this size, of what is equal on all ranks, and is repeated where it has fewer elements."""
    if jnp.size(x) == 1:
        return jnp.broadcast_to(jnp.reshape(x, ()), size)
    return ranks.own(jnp.broadcast_to(x, shape))


def _array(literal: Any) -> Array:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape
