"""Cuts a program into stages at the points where results become ready to be sent.

Source: `DDPOptimizer` in TorchDynamo, which splits a compiled graph at bucket boundaries.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fddp.jax_internals import (
    COLLECTIVES,
    INDEX,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    form_of_program,
    inner_programs,
    jaxpr_as_fun,
    make_program,
)
from fddp.jaxpr.equations import cheap, collectives, straighten, variables
from fddp.jaxpr.flow import arrival, flow

PRODUCTS = {"dot_general", "conv_general_dilated"}
OF_A_REPLICA = COLLECTIVES | {INDEX}


@dataclass(frozen=True)
class Stage:
    """Equations of a program that run as soon as their inputs are available."""

    run: Callable[..., list[Any]]
    """`run(*values read)` → [*values written, *results]."""
    reads: tuple[int, ...]
    """Numbers of the values that it reads: first the program's inputs, then values of stages."""
    writes: tuple[int, ...]
    """Numbers of the values that it writes for later stages."""
    results: int
    """Number of its results, outputs of the program."""
    alike: tuple[bool, ...] = ()
    """Marks the written values that are equal on all replicas."""
    between: tuple[bool, ...] = ()
    """Marks the written values that are outputs of the program, but not results."""
    speaks: bool = False
    """True if it contains collectives."""


def cut(
    closed: ClosedJaxpr,
    groups: Sequence[int],
    input_arrivals: Mapping[int, int] | None = None,
    per_replica: Sequence[int] = (),
    between: Sequence[int] = (),
) -> tuple[Stage, ...]:
    """Cuts a program into a stage for each group of outputs, or several if its inputs arrive late.

    A stage holds, in order, the equations that its group needs and that no earlier stage has. So no
    stage computes anything early that only a later group needs. No equation runs twice, except
    cheap equations that XLA itself would repeat inside a program to save memory: a mask or a
    shifted copy is recomputed from its source, if the source is available or no larger. If a
    group's inputs arrive one after the other, the equations between two arrivals form a stage: no
    stage waits for an input that it does not need.

    `groups` are the numbers of outputs per group, in the order in which groups should be ready.
    They must sum to the number of outputs, or a ValueError is raised. `input_arrivals` maps the
    position of an input to its time of arrival, 0 if omitted. `per_replica` lists the inputs that
    differ between replicas. `between` lists the outputs that are computed with their group for
    later stages and are not results.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: ((y := jnp.sin(x)), jnp.cos(y)))(1.0)
    >>> [(stage.reads, stage.writes) for stage in cut(program, [1, 1])]
    [((0,), (1,)), ((1,), ())]
    >>> late = jax.make_jaxpr(lambda x, y: jnp.cos(jnp.sin(x) + y))(1.0, 1.0)
    >>> [(stage.reads, stage.writes) for stage in cut(late, [1], {1: 1})]
    [((0,), (2,)), ((2, 1), ())]
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    if sum(groups) != len(jaxpr.outvars):
        raise ValueError(
            f"groups must hold the program's {len(jaxpr.outvars)} outputs, got {list(groups)}."
        )
    results = [jaxpr.outvars[a:b] for a, b in pairwise(accumulate(groups, initial=0))]
    maker = {var: position for position, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    when = _when(jaxpr, input_arrivals or {})
    members, results = _by_arrival(jaxpr, _members(jaxpr, results, maker), results, when)
    pairs = [
        _remade(jaxpr, positions, result, maker) for positions, result in zip(members, results)
    ]
    passing = {jaxpr.outvars[number] for number in between}
    results = [
        [v for v in result if isinstance(v, Literal) or v not in passing] for result in results
    ]
    consts = dict(zip(jaxpr.constvars, program.consts))
    needs = [[v for v in need if v not in consts] for _, need in pairs]
    # A stage writes its values with a reader in a later stage.
    written = [
        _ordered(v for need in needs[k + 1 :] for v in need if maker.get(v) in positions)
        for k, positions in enumerate(members)
    ]
    differs = flow(
        jaxpr,
        [number in per_replica for number in range(len(jaxpr.invars))],
        lambda eqn, inputs: [any(inputs) or _is_of_a_replica(eqn)] * len(eqn.outvars),
        lambda atom: False,
    )
    number = {
        var: n for n, var in enumerate([*jaxpr.invars, *(v for values in written for v in values)])
    }
    functions = dict[Any, Callable[..., list[Any]]]()

    def stage(k: int) -> Stage:
        positions, need = pairs[k]
        used = [v for v in need if v in consts]
        eqns = [jaxpr.eqns[position] for position in positions]
        body = make_program(
            program, eqns, needs[k], [*written[k], *results[k]], {v: consts[v] for v in used}
        )
        return Stage(
            run=functions.setdefault(form_of_program(body), jaxpr_as_fun(body)),
            reads=tuple(number[v] for v in needs[k]),
            writes=tuple(number[v] for v in written[k]),
            results=len(results[k]),
            alike=tuple(not differs(v) for v in written[k]),
            between=tuple(v in passing for v in written[k]),
            speaks=bool(collectives(body)),
        )

    return tuple(stage(k) for k in range(len(members)))


def arrivals(closed: ClosedJaxpr, input_arrivals: Mapping[int, int]) -> list[int]:
    """Finds when each output of a program can be computed: the last arrival of its inputs.

    `input_arrivals` maps the position of an input to its time of arrival, 0 if omitted.

    >>> import jax
    >>> arrivals(jax.make_jaxpr(lambda a, b, c: (a + b, c, a * c))(1.0, 2.0, 3.0), {1: 1, 2: 2})
    [1, 2, 2]
    """
    jaxpr = straighten(closed).jaxpr
    when = _when(jaxpr, input_arrivals)
    return [when([atom]) for atom in jaxpr.outvars]


def take_more(closed: ClosedJaxpr, outputs: Sequence[int]) -> bool:
    """Returns True if some outputs of a program need products or loops that no other output needs.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: ((y := jnp.sin(x)), jnp.cos(y), jnp.dot(y, y))
    >>> program = jax.make_jaxpr(f)(jnp.ones(3))
    >>> take_more(program, [1]), take_more(program, [2])
    (False, True)
    """
    jaxpr = straighten(closed).jaxpr
    unchosen, chosen = (
        [var for k, var in enumerate(jaxpr.outvars) if (k in outputs) == inside]
        for inside in (False, True)
    )
    maker = {var: position for position, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    # `_members` gives equations of pure effect (a print) to the last group, which is empty here.
    _, exclusive, _ = _members(jaxpr, [unchosen, chosen, []], maker)
    return any(
        jaxpr.eqns[position].primitive.name in PRODUCTS or inner_programs(jaxpr.eqns[position])
        for position in exclusive
    )


def _is_of_a_replica(eqn: JaxprEqn) -> bool:
    """Returns True if an equation's results may differ between replicas with equal inputs."""
    return acts(eqn) or eqn.primitive.name in OF_A_REPLICA or bool(inner_programs(eqn))


def _when(
    jaxpr: Jaxpr, input_arrivals: Mapping[int, int]
) -> Callable[[Iterable[Var | Literal]], int]:
    """Returns values → the time at which the last of them can be computed; 0 for no value."""
    time = arrival(jaxpr, input_arrivals)
    return lambda atoms: max(map(time, atoms), default=0)


def _by_arrival(
    jaxpr: Jaxpr,
    members: Sequence[set[int]],
    results: Sequence[Sequence[Var | Literal]],
    when: Callable[[Iterable[Var | Literal]], int],
) -> tuple[list[set[int]], list[Sequence[Any]]]:
    """Splits each group's equations by arrival; the group's last stage has all its results."""
    stages = list[set[int]]()
    stage_results = list[Sequence[Any]]()
    latest = 0
    for positions, result in zip(members, results):
        waits = {position: max(latest, when(jaxpr.eqns[position].invars)) for position in positions}
        latest = max([latest, when(result), *waits.values()])
        for stop in sorted({*waits.values(), latest}):
            stages.append({position for position in positions if waits[position] == stop})
            stage_results.append(result if stop == latest else ())
    return stages, stage_results


def _members(
    jaxpr: Jaxpr, results: Sequence[Sequence[Var | Literal]], maker: Mapping[Var, int]
) -> list[set[int]]:
    """Assigns each equation to the first group that needs it; unneeded effects to the last group.

    A needed equation with effects, such as a print, takes along earlier ones with the same effects.
    """
    acting = [position for position, eqn in enumerate(jaxpr.eqns) if acts(eqn)]
    assigned: set[int] = set()
    members: list[set[int]] = []
    for k, result in enumerate(results):
        pending = [maker[v] for v in variables(result) if v in maker]
        pending += acting if k == len(results) - 1 else []
        positions: set[int] = set()
        while pending:
            at = pending.pop()
            if at not in assigned and at not in positions:
                positions.add(at)
                pending += [maker[v] for v in variables(jaxpr.eqns[at].invars) if v in maker]
                # Effects stay in order.
                pending += [
                    a for a in acting if a < at and jaxpr.eqns[a].effects & jaxpr.eqns[at].effects
                ]
        assigned |= positions
        members.append(positions)
    return members


def _remade(
    jaxpr: Jaxpr, positions: set[int], result: Sequence[Var | Literal], maker: Mapping[Var, int]
) -> tuple[list[int], list[Var]]:
    """Adds cheap equations to a stage, to recompute values instead of reading them.

    Returns the positions of all its equations, and the values that it reads.
    """
    extended = set(positions)
    atoms = [*(atom for at in sorted(positions) for atom in jaxpr.eqns[at].invars), *result]
    inputs = {v: None for v in variables(atoms) if maker.get(v) not in positions}
    available = {*jaxpr.constvars, *jaxpr.invars}
    need: list[Var] = []
    while inputs:
        # The value computed last goes first: its sources were computed before it.
        var = max(inputs, key=lambda v: maker.get(v, -1))
        del inputs[var]
        eqn = jaxpr.eqns[maker[var]] if var in maker else None
        sources = _ordered(variables(eqn.invars)) if eqn is not None else []
        extra = sum(_nbytes(v) for v in sources if v not in inputs and v not in available)
        if eqn is not None and cheap(eqn) and extra <= _nbytes(var):
            extended.add(maker[var])
            inputs.update(dict.fromkeys(sources))
        else:
            need.append(var)
    return sorted(extended), need


def _nbytes(var: Var) -> int:
    return (
        math.prod(var.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        * var.aval.dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]
    )


def _ordered(items: Iterable[Var]) -> list[Var]:
    return list(dict.fromkeys(items))
