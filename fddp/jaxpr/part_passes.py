"""Cuts a program on parts of arrays into passes: each rank works on its parts, then a collective follows, and so on.

An optimizer's update is such a program. Adam's is one pass without a collective. A clip by the global norm joins one
number. Muon mixes the elements of a matrix: that leaf is gathered on one rank, its home, which applies the equations
that need the leaf whole, and their results are scattered again. An equation that needs whole arrays of several leaves
at once is in no pass.

Source: ZeRO (Rajbhandari et al., SC 2020), which takes it that all equations are elementwise; Liu et al., "Muon is
Scalable for LLM Training" (2025), which gathers each matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, branches
from fddp.jaxpr.cost import operations
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import (
    Follows,
    Kind,
    Same,
    Total,
    Whole,
    awaits,
    constants,
    either,
    kind_of,
    leaves_of,
    made,
    whole,
)


class OnParts(NamedTuple):
    """An equation that each rank applies to its parts, and to values that are equal everywhere."""

    eqn: JaxprEqn
    given: Sequence[Kind]
    """Kinds of its arguments."""
    makes: Sequence[Kind]
    """Kinds of its results."""


class Visit(NamedTuple):
    """Equations that one leaf's home applies, together, to whole arrays of that leaf."""

    leaf: int
    eqns: Sequence[JaxprEqn]
    takes: Sequence[Var]
    """The arrays that are gathered there from their parts."""
    brings: Sequence[Var]
    """Results that are used elsewhere: they come back in parts, a number as a sum with one summand."""


class Pass(NamedTuple):
    """Equations on parts, and then one kind of collective, totals or visits; none where all is done."""

    parts: Sequence[OnParts]
    numbers: Mapping[str, Sequence[Var]]
    """Op → the totals that all ranks join."""
    visits: Sequence[Visit]


class Stay(NamedTuple):
    """All work of a program on one leaf at its home."""

    operations: int
    """Number of operations, roughly."""
    why: str
    """The first equation that needs the leaf whole."""


def passes(program: ClosedJaxpr, inputs: Sequence[Kind]) -> tuple[list[Pass], dict[Var, Kind]]:
    """Puts the equations of a program into passes.

    Args:
      program: a program of whole arrays, without equations that are `CALLS`.
      inputs: the kind of each of its arguments: `Follows(leaf)` or `Same`.

    Returns:
      The passes, and the kind of each variable after all of them. A variable that is then `Whole` needs arrays of
      several leaves, and no pass makes it.
    """
    found = dict(zip(program.jaxpr.invars, inputs)) | constants(program)
    left = list(program.jaxpr.eqns)
    done = list[Pass]()
    while left:
        # A pass takes all equations that need no further collective, so that totals travel together, and leaves too.
        parts, left, wanted = _on_parts(left, found)
        numbers = _by_op(wanted, found)
        visits, left = ([], left) if numbers else _visits(left, found, program.jaxpr.outvars)
        if not (parts or numbers or visits):
            break
        found.update((var, Same()) for some in numbers.values() for var in some)
        done.append(Pass(parts, numbers, visits))
    for eqn in left:
        found.update(zip(eqn.outvars, _made(eqn, [whole(kind_of(found, atom)) for atom in eqn.invars])))
    return done, found


def kinds(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> list[Kind]:
    """Finds the kinds of a program's results.

    Args:
      closed: any program.
      inputs: the kind of each of its arguments: `Follows(leaf)` or `Same`.

    Returns:
      A kind for each result; `Whole` where no pass makes it.
    """
    program = straighten(closed, CALLS)
    _, found = passes(program, inputs)
    return [kind_of(found, atom) for atom in program.jaxpr.outvars]


def stays(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> dict[int, Stay]:
    """Finds the leaves that a program needs whole.

    Args:
      closed: any program.
      inputs: the kind of each of its arguments.

    Returns:
      The work on each of them at its home.
    """
    found: dict[int, Stay] = {}
    for leaf, stay in _each_stay(straighten(closed, CALLS), inputs):
        before = found.get(leaf, Stay(0, stay.why))
        found[leaf] = Stay(before.operations + stay.operations, before.why)
    return found


def _each_stay(program: ClosedJaxpr, inputs: Sequence[Kind]) -> Iterator[tuple[int, Stay]]:
    for one in passes(program, inputs)[0]:
        for step in one.parts:
            if step.eqn.primitive.name == "cond":
                for branch in branches(step.eqn):
                    yield from stays(branch, step.given[1:]).items()
        for visit in one.visits:
            yield visit.leaf, Stay(sum(map(operations, visit.eqns)), visit.eqns[0].primitive.name)


def _made(eqn: JaxprEqn, given: Sequence[Kind]) -> list[Kind]:
    """Finds the kinds of an equation's results, also of a conditional."""
    given = list(given)
    if eqn.primitive.name == "cond" and isinstance(given[0], Same):
        each = [kinds(branch, [whole(kind) for kind in given[1:]]) for branch in branches(eqn)]
        return [either([whole(kind) for kind in results]) for results in zip(*each)]
    return made(eqn, given)


def _on_parts(
    eqns: Iterable[JaxprEqn], found: dict[Var, Kind]
) -> tuple[list[OnParts], list[JaxprEqn], dict[Any, None]]:
    """Takes the equations that can be applied to parts now; gives them, those left, and the totals these wait for."""
    parts = list[OnParts]()
    left = list[JaxprEqn]()
    wanted = dict[Any, None]()
    for eqn in eqns:
        if all(var in found for var in _read([eqn])):
            given = [kind_of(found, atom) for atom in eqn.invars]
            missing = awaits(eqn, given)
            makes = [] if missing else _made(eqn, given)
            if not missing and not any(isinstance(kind, Whole) for kind in makes):
                parts.append(OnParts(eqn, given, makes))
                found.update(zip(eqn.outvars, makes))
                continue
            wanted.update((eqn.invars[place], None) for place in missing)
        left.append(eqn)
    return parts, left, wanted


def _by_op(wanted: Iterable[Var], found: Mapping[Var, Kind]) -> dict[str, list[Var]]:
    by_op: dict[str, list[Var]] = {}
    for var in wanted:
        kind = found[var]
        if isinstance(kind, Total):
            by_op.setdefault(kind.op, []).append(var)
    return dict(sorted(by_op.items()))


def _visits(
    eqns: Sequence[JaxprEqn], found: dict[Var, Kind], results: Iterable[Any]
) -> tuple[list[Visit], list[JaxprEqn]]:
    """Takes the equations that the leaves' homes can apply now; gives their visits, and the equations left."""
    at: dict[Var, int] = {}
    home = dict[int, list[JaxprEqn]]()
    left = list[JaxprEqn]()
    for eqn in eqns:
        leaf = _home(eqn, found, at)
        if leaf is None:
            left.append(eqn)
        else:
            home.setdefault(leaf, []).append(eqn)
            at.update(dict.fromkeys(eqn.outvars, leaf))
    used = {*_read(left), *(atom for atom in results if not isinstance(atom, Literal))}
    visits = [
        Visit(
            leaf,
            some,
            takes=[var for var in _read(some) if var not in at and isinstance(found[var], Follows)],
            brings=[var for eqn in some for var in eqn.outvars if var in used],
        )
        for leaf, some in home.items()
        if any(var in used for eqn in some for var in eqn.outvars)
    ]
    found.update((var, _back(var, visit.leaf)) for visit in visits for var in visit.brings)
    return visits, left


def _home(eqn: JaxprEqn, found: Mapping[Var, Kind], at: Mapping[Var, int]) -> int | None:
    """Finds the leaf whose home can apply an equation now; None: no home can, or none needs to."""
    read = _read([eqn])
    if not all(var in found or var in at for var in read):
        return None
    there = {at[var] for var in read if var in at}
    elsewhere = [found[var] for var in read if var not in at]
    leaves = leaves_of(elsewhere) | there
    if len(leaves) != 1 or any(isinstance(kind, Total) for kind in elsewhere):
        return None
    (leaf,) = leaves
    if there and leaves_of(elsewhere):
        # An equation that also reads parts of the leaf is applied to parts, if it can be.
        known = {var: whole(_back(var, leaf)) if var in at else found[var] for var in read}
        makes = _made(eqn, [kind_of(known, atom) for atom in eqn.invars])
        return leaf if any(isinstance(kind, Whole) for kind in makes) else None
    return leaf


def _back(var: Any, leaf: int) -> Kind:
    """The kind of an array that was made at home, after it has come back."""
    return Total("sum") if prod(var.aval.shape) == 1 else Follows(leaf)


def _read(eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
    return dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal))
