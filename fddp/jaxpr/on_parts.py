"""A program run on parts of arrays: what follows them element by element is made from the parts, sums over all ranks.

The program is that of whole arrays, with the constants in it (the size that a mean divides by, say); where it works
element by element it is applied to parts, which are flat and may be padded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fddp.jax_internals import (
    CALLS,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    branches,
    of_a_vector,
    run_again,
)
from fddp.jaxpr.elements import ELEMENTWISE, Follows, Kind, Same, Total, Whole, awaits, constants, kind_of, made
from fddp.jaxpr.equations import straighten

# What of a sum, a maximum or a minimum an element is that is not there.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
    "reduce_min": lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


def on_parts(
    closed: ClosedJaxpr,
    inputs: Sequence[Kind],
    there: Callable[[int], Bool[Array, " n"]],
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]],
) -> Callable[..., list[Any]]:
    """Makes a function that runs a program on one rank's parts.

    Args:
      closed: a program of whole arrays.
      inputs: what each of its arguments is, none of them `Whole` or `Total`.
      there: leaf → which elements of this rank's part are of the leaf, and no padding.
      put_together: (op, numbers of this rank) → of all ranks; op is "sum", "max" or "min". It is called as rarely as
        the program allows.

    Returns:
      A function of the arguments, flat parts for those that follow a leaf; it returns the results, flat parts likewise.

    Raises:
      ValueError: a result needs whole arrays.
    """
    program = straighten(closed, CALLS)
    return lambda *arguments: _run(program, inputs, arguments, Ranks(there, put_together))


class Ranks(NamedTuple):
    """What a rank knows of its parts, and how it talks to the others."""

    there: Callable[[int], Bool[Array, " n"]]
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]]


def _run(program: ClosedJaxpr, inputs: Sequence[Kind], arguments: Sequence[Any], ranks: Ranks) -> list[Any]:
    jaxpr = program.jaxpr
    found: dict[Var, Kind] = dict(zip(jaxpr.invars, inputs)) | constants(program)
    values: dict[Var, Any] = dict(zip(jaxpr.invars, arguments)) | dict(zip(jaxpr.constvars, program.consts))

    def combine(wanted: Sequence[Any]) -> None:
        for op in sorted({kind.op for var in wanted if isinstance(kind := found[var], Total)}):
            some = list(dict.fromkeys(var for var in wanted if found[var] == Total(op)))
            values.update(zip(some, ranks.put_together(op, [values[var] for var in some])))
            found.update(dict.fromkeys(some, Same()))

    left = list(jaxpr.eqns)
    while left:
        # All that can be made without another total, so that they travel together.
        later, wanted = list[JaxprEqn](), list[Any]()
        for eqn in left:
            read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            given = [kind_of(found, atom) for atom in eqn.invars] if all(var in values for var in read) else None
            missing = awaits(eqn, given) if given else []
            if given is None or missing:
                later.append(eqn)
                wanted += [eqn.invars[place] for place in missing]
                continue
            results = made(eqn, given)
            arguments = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            values.update(zip(eqn.outvars, _apply(eqn, given, results, arguments, ranks)))
            found.update(zip(eqn.outvars, results))
        combine(wanted)
        left = later
    combine([atom for atom in jaxpr.outvars if not isinstance(atom, Literal)])
    return [_array(x) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


def _array(literal: Any) -> Array:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _apply(
    eqn: JaxprEqn, given: Sequence[Kind], results: Sequence[Kind], arguments: Sequence[Any], ranks: Ranks
) -> Sequence[Any]:
    """What one equation makes of parts."""
    name = eqn.primitive.name
    for kind in results:
        if isinstance(kind, Whole):
            raise ValueError(f"{kind.why} needs whole arrays.")
    parts = [(kind.leaf, x) for kind, x in zip(given, arguments) if isinstance(kind, Follows)]
    if not parts:
        made = run_again(eqn, arguments)
        return made if eqn.primitive.multiple_results else [made]
    (leaf, part), *_ = parts
    if name == "cond":
        each = [partial(_branch, branch, given[1:], results, dict(parts), ranks) for branch in branches(eqn)]
        return jax.lax.switch(arguments[0], each, *arguments[1:])
    if isinstance(results[0], Total):
        neutral = jnp.asarray(NEUTRAL[name](part.dtype) if name in NEUTRAL else 0, part.dtype)
        full = [jnp.where(ranks.there(leaf), spread(x, part.shape), neutral) for x in arguments]
        form: Any = eqn.outvars[0].aval
        return [run_again(eqn if name == "dot_general" else of_a_vector(eqn), full).reshape(form.shape)]
    if name not in ELEMENTWISE:  # the same elements in another shape
        return [part]
    flat = [spread(x, part.shape) for x in arguments]
    return [run_again(eqn, flat)]


def _branch(
    branch: ClosedJaxpr,
    given: Sequence[Kind],
    results: Sequence[Kind],
    parts: Mapping[int, Array],
    ranks: Ranks,
    *arguments: Any,
) -> list[Any]:
    made = _run(straighten(branch, CALLS), given, arguments, ranks)
    # What is equal everywhere in one branch may be a part in another.
    return [spread(x, parts[kind.leaf].shape) if isinstance(kind, Follows) else x for kind, x in zip(results, made)]


def spread(x: Any, shape: tuple[int, ...]) -> Array:
    """A number, or an array of equal ones, in the size of a part, which stays as it is."""
    if jnp.shape(x) == shape:
        return x
    return jnp.broadcast_to(jnp.ravel(x)[0], shape) if jnp.size(x) else jnp.zeros(shape, jnp.result_type(x))
