"""Splits a program on parts of arrays into passes, each followed by a collective.

An optimizer's update is such a program. Adam's is a single pass without a collective. A clip by the
global norm combines a number. Muon mixes the elements of a matrix: that leaf is gathered on a
replica, its owner, which applies the equations on the whole leaf. Their results are scattered
again. An equation that needs whole arrays of several leaves is in no pass.

Source: ZeRO (Rajbhandari et al., SC 2020), which assumes that all equations are elementwise; Liu et
al., "Muon is Scalable for LLM Training" (2025), which gathers each matrix.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, acts, branches
from fddp.jaxpr.equations import form_of, outputs_of, read_by, straighten, variables
from fddp.jaxpr.part_kinds import (
    Follows,
    Kind,
    Same,
    Total,
    Whole,
    as_whole,
    awaits,
    constants,
    either,
    is_whole,
    kinds_of,
    output_kinds,
    source_leaves,
)


class OnParts(NamedTuple):
    """An equation that each replica applies to its parts and to equal values."""

    eqn: JaxprEqn
    given: Sequence[Kind]
    """Kinds of its inputs."""
    makes: Sequence[Kind]
    """Kinds of its results."""


class LeafWork(NamedTuple):
    """Equations on whole arrays of a leaf, for the leaf's owner."""

    leaf: int
    eqns: Sequence[JaxprEqn]
    inputs: Sequence[Var]
    """The arrays that are gathered from their parts."""
    outputs: Sequence[Var]
    """Results with other readers: scattered into parts, but a number is a sum with one summand."""


class Pass(NamedTuple):
    """Equations on parts, then a collective for totals or whole leaves; the last pass has none."""

    parts: Sequence[OnParts]
    numbers: Mapping[str, Sequence[Var]]
    """Op → the totals that the replicas combine."""
    works: Sequence[LeafWork]


def passes(program: ClosedJaxpr, inputs: Sequence[Kind]) -> tuple[list[Pass], dict[Var, Kind]]:
    """Splits a program without `CALLS` into passes; returns them, and the kind of each variable.

    Inputs are `Follows` or `Same`. A variable that is `Whole` after all passes needs arrays of
    several leaves, and no pass computes it. An effect that needs them raises a ValueError.
    """
    var_kinds = dict(zip(program.jaxpr.invars, inputs)) | constants(program)
    eqns = list(program.jaxpr.eqns)
    finished = list[Pass]()
    while eqns:
        # A pass takes all equations that need no further collective, so that a collective carries
        # as many totals, or leaves, as possible.
        steps, eqns, totals = _on_parts(eqns, var_kinds)
        numbers = by_op(totals, var_kinds)
        works = list[LeafWork]()
        if not numbers:
            works, eqns = _leaf_works(eqns, var_kinds, program.jaxpr.outvars)
        if not (steps or numbers or works):
            break
        for combined in numbers.values():
            var_kinds.update(dict.fromkeys(combined, Same()))
        finished.append(Pass(steps, numbers, works))
    for eqn in eqns:
        inputs = list(map(as_whole, kinds_of(var_kinds, eqn.invars)))
        if acts(eqn):
            raise ValueError(
                f"{eqn.primitive.name} of several leaves needs whole arrays, and in shards no "
                "replica has them: call it for each leaf, or for a norm."
            )
        var_kinds.update(zip(eqn.outvars, _result_kinds(eqn, inputs)))
    return finished, var_kinds


def result_kinds(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of a program's results; `Whole` if no pass computes the result."""
    program = straighten(closed, CALLS)
    _, var_kinds = passes(program, inputs)
    return kinds_of(var_kinds, program.jaxpr.outvars)


def whole_leaves(closed: ClosedJaxpr, inputs: Sequence[Kind]) -> dict[int, str]:
    """Finds the leaves that a program needs whole; returns leaf → the first such equation."""
    reasons: dict[int, str] = {}
    for part_pass in passes(straighten(closed, CALLS), inputs)[0]:
        for step in part_pass.parts:
            if step.eqn.primitive.name == "cond":
                for branch in branches(step.eqn):
                    reasons = whole_leaves(branch, step.given[1:]) | reasons
        for work in part_pass.works:
            reasons.setdefault(work.leaf, work.eqns[0].primitive.name)
    return reasons


def _result_kinds(eqn: JaxprEqn, inputs: Sequence[Kind]) -> list[Kind]:
    """Computes the kinds of an equation's results, also of a conditional."""
    if eqn.primitive.name == "cond" and isinstance(inputs[0], Same):
        operands = list(map(as_whole, inputs[1:]))
        by_branch = [map(as_whole, result_kinds(branch, operands)) for branch in branches(eqn)]
        return list(map(either, zip(*by_branch)))
    return output_kinds(eqn, inputs)


def _on_parts(
    eqns: Iterable[JaxprEqn], var_kinds: dict[Var, Kind]
) -> tuple[list[OnParts], list[JaxprEqn], dict[Any, None]]:
    """Selects the equations that can run on parts without a further collective."""
    steps = list[OnParts]()
    remaining = list[JaxprEqn]()
    totals = dict[Any, None]()
    for eqn in eqns:
        if var_kinds.keys() >= set(variables(eqn.invars)):
            inputs = kinds_of(var_kinds, eqn.invars)
            missing = awaits(eqn, inputs)
            totals.update(dict.fromkeys(map(eqn.invars.__getitem__, missing)))
            if not missing:
                results = _result_kinds(eqn, inputs)
                # An equation without results, such as a print, needs whole arrays.
                acts_on_leaves = not results and source_leaves(inputs)
                if not acts_on_leaves and not any(map(is_whole, results)):
                    steps.append(OnParts(eqn, inputs, results))
                    var_kinds.update(zip(eqn.outvars, results))
                    continue
        remaining.append(eqn)
    return steps, remaining, totals


def by_op(values: Iterable[Var], var_kinds: Mapping[Var, Kind]) -> dict[str, list[Var]]:
    """Op → the totals among some variables that the replicas combine with it."""
    totals: dict[str, list[Var]] = {}
    for var in values:
        kind = var_kinds[var]
        if isinstance(kind, Total):
            totals.setdefault(kind.op, []).append(var)
    return dict(sorted(totals.items()))


def _leaf_works(
    eqns: Sequence[JaxprEqn], var_kinds: dict[Var, Kind], results: Iterable[Var | Literal]
) -> tuple[list[LeafWork], list[JaxprEqn]]:
    """Selects the equations for owners of leaves; returns their work, and the other equations."""
    at_owner: dict[Var, Kind] = {}
    by_leaf: dict[int, list[JaxprEqn]] = {}
    remaining = list[JaxprEqn]()
    for eqn in eqns:
        leaf = _owned_leaf(eqn, var_kinds, at_owner)
        if leaf is None:
            remaining.append(eqn)
        else:
            by_leaf.setdefault(leaf, []).append(eqn)
            at_owner.update(dict.fromkeys(eqn.outvars, Whole(frozenset({leaf}), "")))
    used = {*read_by(remaining), *variables(results)}
    works = list[LeafWork]()
    for leaf, leaf_eqns in by_leaf.items():
        outputs = list(filter(used.__contains__, outputs_of(leaf_eqns)))
        if outputs or any(map(acts, leaf_eqns)):
            inputs = [x for x in read_by(leaf_eqns) if isinstance(var_kinds.get(x), Follows)]
            works.append(LeafWork(leaf, leaf_eqns, inputs, outputs))
            var_kinds.update({var: _scattered(leaf, var) for var in outputs})
    return works, remaining


def _owned_leaf(
    eqn: JaxprEqn, var_kinds: Mapping[Var, Kind], at_owner: Mapping[Var, Kind]
) -> int | None:
    """Finds the leaf whose owner must apply an equation; None if no owner can or must."""
    read = dict.fromkeys(variables(eqn.invars))
    kinds = {var: kind for var in read if (kind := at_owner.get(var) or var_kinds.get(var))}
    leaves = source_leaves(list(kinds.values()))
    if kinds.keys() < read.keys() or len(leaves) != 1 or Total in map(type, kinds.values()):
        return None
    (leaf,) = leaves
    if Whole in map(type, kinds.values()) and Follows(leaf) in kinds.values():
        # An equation that also reads parts of the leaf is applied to parts, if it can be.
        on_parts = {var: as_whole(_scattered(leaf, var)) for var in read if var in at_owner}
        if not any(map(is_whole, _result_kinds(eqn, kinds_of(kinds | on_parts, eqn.invars)))):
            return None
    return leaf


def _scattered(leaf: int, var: Var) -> Kind:
    """The kind of an array from a leaf's owner after the scatter."""
    return Total("sum") if form_of(var).size == 1 else Follows(leaf)
