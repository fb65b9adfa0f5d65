"""Splits a program on parts of arrays into passes, each followed by a collective.

An optimizer's update is such a program. Adam's is a single pass without a collective. A clip by the
global norm combines a number. Muon mixes the elements of a matrix: that leaf is gathered on a
replica, its home, which applies the equations on the whole leaf. Their results are scattered again.
An equation that needs whole arrays of several leaves is in no pass.

Source: ZeRO (Rajbhandari et al., SC 2020), which assumes that all equations are elementwise; Liu et
al., "Muon is Scalable for LLM Training" (2025), which gathers each matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, branches
from fddp.jaxpr.cost import operations
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.parts.part_kinds import (
    Follows,
    Kind,
    Same,
    Total,
    Whole,
    as_whole,
    awaits,
    constants,
    either,
    kind_of,
    made,
    source_leaves,
)


class OnParts(NamedTuple):
    """An equation that each replica applies to its parts and to equal values."""

    eqn: JaxprEqn
    given: Sequence[Kind]
    """Kinds of its inputs."""
    makes: Sequence[Kind]
    """Kinds of its results."""


class Visit(NamedTuple):
    """Equations on whole arrays of a leaf, for the leaf's home."""

    leaf: int
    eqns: Sequence[JaxprEqn]
    takes: Sequence[Var]
    """The arrays that are gathered from their parts."""
    brings: Sequence[Var]
    """Results with other readers: scattered into parts, but a number is a sum with one summand."""


class Pass(NamedTuple):
    """Equations on parts, then a collective for totals or for visits; the last pass has none."""

    parts: Sequence[OnParts]
    numbers: Mapping[str, Sequence[Var]]
    """Op → the totals that the replicas combine."""
    visits: Sequence[Visit]


class Stay(NamedTuple):
    """A program's work on a leaf at its home."""

    operations: int
    """Approximate number of operations."""
    why: str
    """The first equation that needs the leaf whole."""


def passes(program: ClosedJaxpr, inputs: Sequence[Kind]) -> tuple[list[Pass], dict[Var, Kind]]:
    """Splits a program without `CALLS` into passes; returns them, and the kind of each variable.

    Inputs are `Follows` or `Same`. A variable that is `Whole` after all passes needs arrays of
    several leaves, and no pass computes it.
    """
    var_kinds = dict(zip(program.jaxpr.invars, inputs)) | constants(program)
    eqns = list(program.jaxpr.eqns)
    finished = list[Pass]()
    while eqns:
        # A pass takes all equations that need no further collective, so that a collective carries
        # as many totals, or leaves, as possible.
        steps, eqns, totals = _on_parts(eqns, var_kinds)
        numbers = _by_op(totals, var_kinds)
        visits, eqns = ([], eqns) if numbers else _visits(eqns, var_kinds, program.jaxpr.outvars)
        if not (steps or numbers or visits):
            break
        var_kinds.update((var, Same()) for combined in numbers.values() for var in combined)
        finished.append(Pass(steps, numbers, visits))
    for eqn in eqns:
        var_kinds.update(
            zip(
                eqn.outvars, _made(eqn, [as_whole(kind_of(var_kinds, atom)) for atom in eqn.invars])
            )
        )
    return finished, var_kinds


def result_kinds(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of a program's results; `Whole` if no pass computes the result."""
    program = straighten(closed, CALLS)
    _, var_kinds = passes(program, inputs)
    return [kind_of(var_kinds, atom) for atom in program.jaxpr.outvars]


def stays(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> dict[int, Stay]:
    """Finds the leaves that a program needs whole; returns leaf → the work at its home."""
    by_leaf: dict[int, Stay] = {}
    for leaf, stay in _each_stay(straighten(closed, CALLS), inputs):
        before = by_leaf.get(leaf, Stay(0, stay.why))
        by_leaf[leaf] = Stay(before.operations + stay.operations, before.why)
    return by_leaf


def _each_stay(program: ClosedJaxpr, inputs: Sequence[Kind]) -> Iterator[tuple[int, Stay]]:
    for part_pass in passes(program, inputs)[0]:
        for step in part_pass.parts:
            if step.eqn.primitive.name == "cond":
                for branch in branches(step.eqn):
                    yield from stays(branch, step.given[1:]).items()
        for visit in part_pass.visits:
            yield visit.leaf, Stay(sum(map(operations, visit.eqns)), visit.eqns[0].primitive.name)


def _made(eqn: JaxprEqn, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of an equation's results, also of a conditional."""
    inputs = list(inputs)
    if eqn.primitive.name == "cond" and isinstance(inputs[0], Same):
        by_branch = [
            result_kinds(branch, [as_whole(kind) for kind in inputs[1:]])
            for branch in branches(eqn)
        ]
        return [either([as_whole(kind) for kind in results]) for results in zip(*by_branch)]
    return made(eqn, inputs)


def _on_parts(
    eqns: Iterable[JaxprEqn], var_kinds: dict[Var, Kind]
) -> tuple[list[OnParts], list[JaxprEqn], dict[Any, None]]:
    """Selects the equations that can run on parts without a further collective.

    Returns them, the remaining equations, and the totals that these wait for.
    """
    steps = list[OnParts]()
    remaining = list[JaxprEqn]()
    totals = dict[Any, None]()
    for eqn in eqns:
        if all(var in var_kinds for var in _read([eqn])):
            inputs = [kind_of(var_kinds, atom) for atom in eqn.invars]
            missing = awaits(eqn, inputs)
            makes = [] if missing else _made(eqn, inputs)
            if not missing and not any(isinstance(kind, Whole) for kind in makes):
                steps.append(OnParts(eqn, inputs, makes))
                var_kinds.update(zip(eqn.outvars, makes))
                continue
            totals.update((eqn.invars[position], None) for position in missing)
        remaining.append(eqn)
    return steps, remaining, totals


def _by_op(totals: Iterable[Var], var_kinds: Mapping[Var, Kind]) -> dict[str, list[Var]]:
    by_op: dict[str, list[Var]] = {}
    for var in totals:
        kind = var_kinds[var]
        if isinstance(kind, Total):
            by_op.setdefault(kind.op, []).append(var)
    return dict(sorted(by_op.items()))


def _visits(
    eqns: Sequence[JaxprEqn], var_kinds: dict[Var, Kind], results: Iterable[Var | Literal]
) -> tuple[list[Visit], list[JaxprEqn]]:
    """Selects the equations that homes can apply; returns their visits, and the other equations."""
    leaf_of: dict[Var, int] = {}
    by_leaf = dict[int, list[JaxprEqn]]()
    remaining = list[JaxprEqn]()
    for eqn in eqns:
        leaf = _home(eqn, var_kinds, leaf_of)
        if leaf is None:
            remaining.append(eqn)
        else:
            by_leaf.setdefault(leaf, []).append(eqn)
            leaf_of.update(dict.fromkeys(eqn.outvars, leaf))
    used = {*_read(remaining), *(atom for atom in results if not isinstance(atom, Literal))}
    visits = [
        Visit(
            leaf,
            home_eqns,
            takes=[
                var
                for var in _read(home_eqns)
                if var not in leaf_of and isinstance(var_kinds[var], Follows)
            ],
            brings=[var for eqn in home_eqns for var in eqn.outvars if var in used],
        )
        for leaf, home_eqns in by_leaf.items()
        if any(var in used for eqn in home_eqns for var in eqn.outvars)
    ]
    var_kinds.update((var, _back(var, visit.leaf)) for visit in visits for var in visit.brings)
    return visits, remaining


def _home(eqn: JaxprEqn, var_kinds: Mapping[Var, Kind], leaf_of: Mapping[Var, int]) -> int | None:
    """Finds the leaf whose home must apply an equation; None if no home can or must.

    `leaf_of` maps a variable that is computed at a home to the leaf.
    """
    read = _read([eqn])
    if not all(var in var_kinds or var in leaf_of for var in read):
        return None
    home_leaves = {leaf_of[var] for var in read if var in leaf_of}
    outer_kinds = [var_kinds[var] for var in read if var not in leaf_of]
    leaves = source_leaves(outer_kinds) | home_leaves
    if len(leaves) != 1 or any(isinstance(kind, Total) for kind in outer_kinds):
        return None
    (leaf,) = leaves
    if home_leaves and source_leaves(outer_kinds):
        # An equation that also reads parts of the leaf is applied to parts, if it can be.
        scattered = {
            var: as_whole(_back(var, leaf)) if var in leaf_of else var_kinds[var] for var in read
        }
        makes = _made(eqn, [kind_of(scattered, atom) for atom in eqn.invars])
        return leaf if any(isinstance(kind, Whole) for kind in makes) else None
    return leaf


def _back(var: Any, leaf: int) -> Kind:
    """The kind of an array from a leaf's home after the scatter."""
    return Total("sum") if prod(var.aval.shape) == 1 else Follows(leaf)


def _read(eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
    return dict.fromkeys(
        atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal)
    )
