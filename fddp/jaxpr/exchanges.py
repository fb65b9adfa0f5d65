"""Takes a program's collectives over the replicas' axis out of it, so that they travel between its stages.

What an equation is given becomes an output of the program, and what it makes an input that comes later. Equations that
stand in the way of loops and branches stay there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from typing import Any, NamedTuple

import jax

from fddp.jax_internals import (
    COLLECTIVES,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    axes_of,
    jaxpr_as_fun,
    make_program,
    run_as_it_is,
)
from fddp.jaxpr.equations import cheap, straighten, value_of, variables
from fddp.jaxpr.flow import arrival, flow


@dataclass(frozen=True)
class Exchange:
    """Some collectives that leave together."""

    name: str
    """Their names, in JAX's words."""
    run: Callable[..., list[Any]]
    """`run(*what this replica gives)` → what comes back."""
    given: int
    """Number of arrays that it is given."""
    back: tuple[jax.ShapeDtypeStruct, ...]
    """The forms of what comes back."""
    after: int
    """The time at which the last of the program's inputs comes that it waits for."""


class Apart(NamedTuple):
    """A program without its collectives."""

    run: Callable[..., list[Any]]
    """(*its inputs, *what comes back) → [*its outputs, *what is given]; exchanged arrays have a first dim of 1."""
    exchanges: tuple[Exchange, ...]
    """The collectives, in order."""


def apart(closed: ClosedJaxpr, axis_name: str | None, comes: Mapping[int, int]) -> Apart | None:
    """Takes the collectives out of a program.

    Args:
      closed: the program.
      axis_name: the axis that they go over; None: no axis.
      comes: number of an input → when it comes; the others are there from 0.

    Returns:
      The program, to be traced, and its collectives; None if it has none outside of loops and branches.
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    batches = _batches(program, axis_name)
    if not batches:
        return None
    when = arrival(jaxpr, comes)
    exchanges = [_exchange(program, eqns, when) for eqns in batches]
    first = {id(eqns[0]): eqns for eqns in batches}
    others = {id(eqn) for eqns in batches for eqn in eqns[1:]}

    def run(*args: Any) -> list[Any]:
        values: dict[Var, Any] = dict(zip(jaxpr.constvars, program.consts)) | dict(zip(jaxpr.invars, args))
        came = iter(args[len(jaxpr.invars) :])
        gives = list[Any]()
        # What later collectives of a batch are given may be made, by cheap equations, behind the first one.
        for eqn in _in_order(jaxpr.eqns, batches):
            if id(eqn) in first:
                eqns = first[id(eqn)]
                gives += [value_of(values, var)[None] for var in _operands(eqns)]
                values.update((var, next(came)[0]) for var in _made(eqns))
            elif id(eqn) not in others:
                made = run_as_it_is(program, eqn, [value_of(values, atom) for atom in eqn.invars])
                values.update(zip(eqn.outvars, made))
        return [*(value_of(values, atom) for atom in jaxpr.outvars), *gives]

    return Apart(run, tuple(exchanges))


def _batches(program: ClosedJaxpr, axis_name: str | None) -> list[list[JaxprEqn]]:
    """The collectives, in order; those that wait for nothing costly behind the first of a batch join it."""
    jaxpr = program.jaxpr
    numbers = count_up()

    def made(eqn: JaxprEqn, places: list[int]) -> list[int]:
        number = next(numbers)
        return [max(places, default=-1) if cheap(eqn) else number] * len(eqn.outvars)

    place = flow(jaxpr, [-1] * len(jaxpr.invars), made, lambda atom: -1)
    batches = list[list[JaxprEqn]]()
    begin = 0
    for at, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in COLLECTIVES or axis_name not in axes_of(eqn) or not _operands([eqn]):
            continue
        if batches and max(map(place, eqn.invars), default=-1) < begin:
            batches[-1].append(eqn)
        else:
            batches.append([eqn])
            begin = at
    return batches


def _in_order(eqns: Sequence[JaxprEqn], batches: Sequence[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """The equations, with those that a batch needs in front of its first collective."""
    maker = {var: eqn for eqn in eqns for var in eqn.outvars}
    first = {id(batch[0]): batch for batch in batches}
    done = set[int]()
    ordered = list[JaxprEqn]()

    def put(eqn: JaxprEqn) -> None:
        pending = [(eqn, False)]
        while pending:
            one, ready = pending.pop()
            if id(one) in done:
                continue
            if ready:
                done.add(id(one))
                ordered.append(one)
                continue
            pending.append((one, True))
            needed = [var for other in first.get(id(one), [one]) for var in other.invars]
            pending += [(maker[var], False) for var in needed if not isinstance(var, Literal) and var in maker]

    for eqn in eqns:
        put(eqn)
    return ordered


def _exchange(program: ClosedJaxpr, eqns: Sequence[JaxprEqn], when: Callable[[Any], int]) -> Exchange:
    given = _operands(eqns)
    made = _made(eqns)
    names = ["psum_scatter" if eqn.primitive.name == "reduce_scatter" else eqn.primitive.name for eqn in eqns]
    back = tuple(jax.ShapeDtypeStruct((1, *var.aval.shape), var.aval.dtype) for var in made)  # pyright: ignore[reportAttributeAccessIssue]
    run = jaxpr_as_fun(make_program(program, eqns, given, made))
    return Exchange(", ".join(dict.fromkeys(names)), run, len(given), back, max(map(when, given), default=0))


def _operands(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)))


def _made(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return [var for eqn in eqns for var in eqn.outvars]
