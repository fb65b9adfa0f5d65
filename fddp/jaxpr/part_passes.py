"""Cuts a program on parts of arrays into passes: each rank works on its parts, then a collective follows, and so on.

An optimizer's update is such a program. Adam's is one pass without a collective. A clip by the global norm joins one
number. Muon mixes the elements of a matrix: its parts are gathered, all ranks apply the equations that need it whole,
and each keeps its own part of what it goes on with in parts.

Source: ZeRO (Rajbhandari et al., SC 2020), which takes it that all equations are elementwise; Liu et al., "Muon is
Scalable for LLM Training" (2025), which gathers each matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, branches
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import (
    Follows,
    Kind,
    Same,
    Total,
    Whole,
    awaits,
    either,
    joined,
    kind_of,
    leaves_of,
    made,
    needs_whole,
)


class Step(NamedTuple):
    """An equation that each rank applies, to its parts or to what is equal on all ranks."""

    eqn: JaxprEqn
    given: Sequence[Kind]
    """Kinds of its arguments; `Whole` where it takes a gathered array."""
    makes: Sequence[Kind]
    """Kinds of its results."""


class Pass(NamedTuple):
    """Equations, and then the collectives that the next ones need; none where all is done."""

    steps: Sequence[Step]
    totals: Mapping[str, Sequence[Var]]
    """Op → the totals that all ranks join."""
    gathers: Mapping[Var, str]
    """The arrays that are gathered from their parts → the first equation that needs them whole."""


def passes(program: ClosedJaxpr, inputs: Sequence[Kind]) -> tuple[list[Pass], dict[Var, Kind]]:
    """Puts the equations of a program into passes.

    Args:
      program: a program of whole arrays, without equations that are `CALLS`.
      inputs: the kind of each of its arguments, none of them a `Total`.

    Returns:
      The passes, and the kind of each variable after all of them. What is then a `Total` only results need.
    """
    found = dict(zip(program.jaxpr.invars, inputs)) | dict.fromkeys(program.jaxpr.constvars, Same())
    gathered = set[Var]()
    left = list(program.jaxpr.eqns)
    done = list[Pass]()
    while left:
        # A pass takes all equations that need no further collective, so that totals travel together.
        steps, left, wanted = _applicable(left, found, gathered)
        totals = by_op(wanted, found)
        gathers = {var: why for var, why in wanted.items() if isinstance(found[var], Follows)}
        gathered.update(gathers)
        found.update((var, Same()) for some in totals.values() for var in some)
        done.append(Pass(steps, totals, gathers))
    return done, found


def by_op(wanted: Iterable[Any], found: Mapping[Var, Kind]) -> dict[str, list[Var]]:
    """Sorts the totals among some variables by the operation that joins them."""
    totals: dict[str, list[Var]] = {}
    for var in dict.fromkeys(atom for atom in wanted if not isinstance(atom, Literal)):
        kind = found[var]
        if isinstance(kind, Total):
            totals.setdefault(kind.op, []).append(var)
    return dict(sorted(totals.items()))


def kinds(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> list[Kind]:
    """Finds the kinds of a program's results.

    Args:
      closed: any program.
      inputs: the kind of each of its arguments.

    Returns:
      A kind for each result.
    """
    program = straighten(closed, CALLS)
    _, found = passes(program, inputs)
    return [kind_of(found, atom) for atom in program.jaxpr.outvars]


def needed_whole(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> dict[int, str]:
    """Finds the leaves of which a program needs an array whole.

    Args:
      closed: any program.
      inputs: the kind of each of its arguments.

    Returns:
      These leaves → the first equation that needs one whole.
    """
    found: dict[int, str] = {}
    for leaf, why in _gathers(straighten(closed, CALLS), inputs):
        found.setdefault(leaf, why)
    return found


def _gathers(program: ClosedJaxpr, inputs: Sequence[Kind]) -> Iterator[tuple[int, str]]:
    done, found = passes(program, inputs)
    for one in done:
        for step in one.steps:
            if step.eqn.primitive.name == "cond":
                for branch in branches(step.eqn):
                    yield from needed_whole(branch, step.given[1:]).items()
        for var, why in one.gathers.items():
            yield from ((leaf, why) for leaf in leaves_of([found[var]]))


def _made(eqn: JaxprEqn, given: Sequence[Kind]) -> list[Kind]:
    """Finds the kinds of an equation's results, also of a conditional."""
    if eqn.primitive.name == "cond" and given[0] == Same():
        each = [kinds(branch, given[1:]) for branch in branches(eqn)]
        return [either([joined(kind) for kind in results]) for results in zip(*each)]
    return made(eqn, given)


def _applicable(
    eqns: Iterable[JaxprEqn], found: dict[Var, Kind], gathered: set[Var]
) -> tuple[list[Step], list[JaxprEqn], dict[Any, str]]:
    """Takes the equations that can be applied now; gives them, those left, and what these wait for."""
    steps = list[Step]()
    left = list[JaxprEqn]()
    wanted = dict[Any, str]()
    for eqn in eqns:
        if not all(isinstance(atom, Literal) or atom in found for atom in eqn.invars):
            left.append(eqn)
            continue
        given = [kind_of(found, atom) for atom in eqn.invars]
        waits = awaits(eqn, given)
        makes = list[Kind]()
        if not waits:
            given, makes, whole = _gathered(eqn, given)
            waits = [place for place in whole if eqn.invars[place] not in gathered]
        if waits:
            left.append(eqn)
            for place in waits:
                wanted.setdefault(eqn.invars[place], eqn.primitive.name)
        else:
            steps.append(Step(eqn, given, makes))
            found.update(zip(eqn.outvars, makes))
    return steps, left, wanted


def _gathered(eqn: JaxprEqn, given: Sequence[Kind]) -> tuple[Sequence[Kind], list[Kind], list[int]]:
    """The kinds of an equation's arguments and of its results, and the places of arguments that it needs gathered."""
    makes = _made(eqn, given)
    if not any(isinstance(kind, Whole) for kind in makes):
        return given, makes, []
    whole = needs_whole(eqn, given)
    why = next(kind.why for kind in makes if isinstance(kind, Whole))
    given = [Whole(leaves_of([kind]), why) if place in whole else kind for place, kind in enumerate(given)]
    leaves = leaves_of(given)

    def settled(kind: Kind, var: Any) -> Kind:
        if not isinstance(kind, Whole):
            return kind
        # A number that is made of one leaf alone is a number as any other.
        return Same() if len(leaves) == 1 and prod(var.aval.shape) == 1 else Whole(leaves, why)

    return given, list(map(settled, made(eqn, given), eqn.outvars)), whole
