"""Finds the loop of whose rows values are made, row by row, and what else they are made of.

What is computed behind a loop, of its rows and of what was there before it, can be computed inside of the loop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    joins_first_dim,
    loop_parts,
    pads_rows,
    permutes,
    scan_body,
)
from fddp.jaxpr.equations import makers, straighten, variables
from fddp.jaxpr.part_kinds import ELEMENTWISE, RESHAPES
from fddp.jaxpr.rounds import Stack, form_of, with_slices


def made_row_by_row(closed: ClosedJaxpr) -> dict[int, Stack]:
    """Finds the outputs of a program that one of its loops could make, row by row, to the end.

    Args:
      closed: the program.

    Returns:
      Number of such an output → the loop. All that is computed behind the loop can be computed inside of it.
    """
    jaxpr = straighten(closed).jaxpr
    found: dict[int, Stack] = {}
    for number, atom in enumerate(jaxpr.outvars):
        origin = None if isinstance(atom, Literal) else origin_of(jaxpr, [atom], [], len(jaxpr.eqns))
        if origin:
            found[number] = Stack(origin.loop, scan_body(jaxpr.eqns[origin.loop])[1]["length"])
    return found


def places(closed: ClosedJaxpr) -> list[int]:
    """Finds the place, among a program's equations, of the last one that each of its outputs is made by; -1: none."""
    jaxpr = straighten(closed).jaxpr
    place = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    return [-1 if isinstance(atom, Literal) else place.get(atom, -1) for atom in jaxpr.outvars]


class Origin(NamedTuple):
    """A loop of whose rows some values are made, row by row."""

    loop: int
    """The place of the loop in its program."""
    between: tuple[JaxprEqn, ...]
    """The equations that make the values of the loop's rows, in order."""
    needs: frozenset[Var]
    """The values beside these rows that the equations read; none of them comes from the loop."""


def origin_of(jaxpr: Jaxpr, rows: Sequence[Any], whole: Sequence[Any], end: int) -> Origin | None:
    """Finds the last loop of whose rows values are made, if all else that they are made of is there before it.

    Args:
      jaxpr: the program.
      rows: the values.
      whole: others, which must be there before the loop.
      end: the place of the equation that reads both.
    """
    place = _last_loop(jaxpr, rows, end)
    if place is None:
        return None
    loop = jaxpr.eqns[place]
    length = scan_body(loop)[1]["length"]
    late = _reached(jaxpr.eqns[place:end], loop)
    wanted = late.intersection(variables(rows))
    needs = {*variables(rows), *variables(whole)} - wanted
    between: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns[place + 1 : end]):
        if wanted.isdisjoint(eqn.outvars):
            continue
        read = set(rows_read(eqn))
        given = set(variables(eqn.invars))
        if not read or not all(_in_rows(atom, length) for atom in (*read, *eqn.outvars)):
            return None
        between.append(eqn)
        wanted |= given & late & read
        needs |= given - read | given - late
    carried = len(loop_parts(loop, loop.invars)[1])
    alone = needs.isdisjoint(late) and wanted.isdisjoint(loop.outvars[:carried])
    fit = all(_in_rows(atom, length) for atom in rows)
    # What runs earlier than it stands holds no loop, so that loops run in their order.
    moved = [eqn for eqn in makers(jaxpr.eqns[place + 1 : end], needs) if eqn.primitive.name == "scan"]
    return Origin(place, tuple(reversed(between)), frozenset(needs)) if alone and fit and not moved else None


def _last_loop(jaxpr: Jaxpr, rows: Sequence[Any], end: int) -> int | None:
    wanted = set(variables(rows))
    for place in reversed(range(end)):
        eqn = jaxpr.eqns[place]
        if wanted.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name == "scan":
            return place
        wanted.update(rows_read(eqn))
    return None


def _reached(eqns: Sequence[JaxprEqn], first: JaxprEqn) -> set[Var]:
    """The values that are made of what an equation makes, with these."""
    reached = set(first.outvars)
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def rows_read(eqn: JaxprEqn) -> list[Var]:
    """The inputs of which an equation makes rows of its result, row by row; all others are read whole.

    A row is an equal part along the first dim. Reshaping keeps the order of elements, and so the parts.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return with_slices(eqn)
    keeps = name in RESHAPES and not permutes(eqn)
    beside = (name == "concatenate" and not joins_first_dim(eqn)) or pads_rows(eqn)
    return list(variables(eqn.invars[:1] if name == "pad" else eqn.invars)) if keeps or beside else []


def _in_rows(atom: Any, length: int) -> bool:
    """Whether an array has so many equal parts along its first dim."""
    dims = form_of(atom)[0]
    return bool(dims and length) and dims[0] % length == 0


def row_dims(atom: Any, length: int) -> tuple[int, ...]:
    """The dims of one of these parts."""
    first, *others = form_of(atom)[0]
    return first // length, *others
