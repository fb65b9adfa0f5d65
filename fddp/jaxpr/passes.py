"""A program on parts of arrays in passes: what each rank makes of its parts, then a word with the others, and again.

An optimizer's update is such a program. Adam's is one pass without a word. A clip by the global norm puts one number
together. Muon mixes the elements of a matrix: that leaf goes home, to one rank, which does what needs the leaf whole,
and what it has made comes back in parts. What needs whole arrays of several leaves at once is in no pass.

Source: ZeRO (Rajbhandari et al., SC 2020), which takes it that all goes element by element; Liu et al., "Muon is
Scalable for LLM Training" (2025), which gathers each matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, branches
from fddp.jaxpr.cost import operations
from fddp.jaxpr.elements import (
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
from fddp.jaxpr.equations import straighten


class OnParts(NamedTuple):
    """An equation that each rank applies to its parts, and to what is equal everywhere."""

    eqn: JaxprEqn
    given: Sequence[Kind]
    makes: Sequence[Kind]


class Visit(NamedTuple):
    """What one leaf goes home for."""

    leaf: int
    eqns: Sequence[JaxprEqn]
    takes: Sequence[Var]
    """The arrays that go there, out of their parts."""
    brings: Sequence[Var]
    """What is made there and used elsewhere: it comes back in parts, a number as a sum with one summand."""


class Pass(NamedTuple):
    """What is done in one go: on parts, and then one of the other two, or nothing where all is done."""

    parts: Sequence[OnParts]
    numbers: Mapping[str, Sequence[Var]]
    """Op → what is put together of all ranks."""
    visits: Sequence[Visit]


class Stay(NamedTuple):
    """What a leaf does at home in all of a program."""

    operations: int
    why: str
    """The first equation that needs it whole."""


def passes(program: ClosedJaxpr, inputs: Sequence[Kind]) -> tuple[list[Pass], dict[Var, Kind]]:
    """Puts the equations of a program in order.

    Args:
      program: of whole arrays, without equations that are `CALLS`.
      inputs: what each of its arguments is: `Follows(leaf)` or `Same`.

    Returns:
      The passes; and what each variable is when all are done. What is `Whole` then needs arrays of several leaves, and
      is in none of them.
    """
    found = dict(zip(program.jaxpr.invars, inputs)) | constants(program)
    left, done = list(program.jaxpr.eqns), list[Pass]()
    while left:
        # All that can be made without another word, so that numbers travel together, and leaves.
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
    """What each result of a program is.

    Args:
      closed: any program.
      inputs: what each of its arguments is: `Follows(leaf)` or `Same`.

    Returns:
      One for each result; `Whole`, where it cannot be made.
    """
    program = straighten(closed, CALLS)
    _, found = passes(program, inputs)
    return [kind_of(found, atom) for atom in program.jaxpr.outvars]


def stays(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> dict[int, Stay]:
    """The leaves that a program needs whole.

    Args:
      closed: any program.
      inputs: what each of its arguments is.

    Returns:
      What each of them does at home.
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
    """What an equation makes, of branches too."""
    given = list(given)
    if eqn.primitive.name == "cond" and isinstance(given[0], Same):
        each = [kinds(branch, [whole(kind) for kind in given[1:]]) for branch in branches(eqn)]
        return [either([whole(kind) for kind in results]) for results in zip(*each)]
    return made(eqn, given)


def _on_parts(
    eqns: Iterable[JaxprEqn], found: dict[Var, Kind]
) -> tuple[list[OnParts], list[JaxprEqn], dict[Any, None]]:
    """What can be made of parts now, what is left, and the numbers that it waits for."""
    parts, left, wanted = list[OnParts](), list[JaxprEqn](), dict[Any, None]()
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
    """What can be made at the leaves' homes now, and what is left."""
    at: dict[Var, int] = {}
    home, left = dict[int, list[JaxprEqn]](), list[JaxprEqn]()
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
    """The leaf at whose home an equation can be applied; None: it cannot be now, or need not be."""
    read = _read([eqn])
    if not all(var in found or var in at for var in read):
        return None
    there, elsewhere = {at[var] for var in read if var in at}, [found[var] for var in read if var not in at]
    leaves = leaves_of(elsewhere) | there
    if len(leaves) != 1 or any(isinstance(kind, Total) for kind in elsewhere):
        return None
    (leaf,) = leaves
    if there and leaves_of(elsewhere):
        # What meets parts of its leaf goes on in parts, if it can.
        known = {var: whole(_back(var, leaf)) if var in at else found[var] for var in read}
        makes = _made(eqn, [kind_of(known, atom) for atom in eqn.invars])
        return leaf if any(isinstance(kind, Whole) for kind in makes) else None
    return leaf


def _back(var: Any, leaf: int) -> Kind:
    """What an array that was made at home is when it has come back."""
    return Total("sum") if prod(var.aval.shape) == 1 else Follows(leaf)


def _read(eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
    return dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal))
