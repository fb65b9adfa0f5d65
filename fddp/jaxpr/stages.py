"""Cuts a program into stages at the points where results become ready to be sent.

Source: `DDPOptimizer` in TorchDynamo, which splits a compiled graph at bucket boundaries.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, count, filterfalse, pairwise
from typing import Any

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    acts_alike,
    form_of_program,
    inner_programs,
    jaxpr_as_fun,
    make_program,
)
from fddp.jaxpr.equations import (
    OF_A_REPLICA,
    cheap,
    collectives,
    form_of,
    maker_positions,
    read_by,
    straighten,
    variables,
)
from fddp.jaxpr.flow import arrival, flow
from fddp.jaxpr.leaves import split_leaves

PRODUCTS = {"dot_general", "conv_general_dilated"}


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
    acts: bool = False
    """True if it contains equations with an effect, such as a print."""


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
    maker = maker_positions(jaxpr)
    when = arrival(jaxpr, input_arrivals or {})
    members, results = _by_arrival(jaxpr, _members(jaxpr, results, maker), results, when)
    extended = list(map(partial(_remade, jaxpr, maker), members, results))
    consts = dict(zip(jaxpr.constvars, program.consts))
    reads = [list(filterfalse(consts.__contains__, need)) for _, need in extended]
    # A stage writes its values with a reader in a later stage.
    stage_of = dict[int, int]()
    for k, positions in enumerate(members):
        stage_of.update(dict.fromkeys(positions, k))
    written = [dict[Var, None]() for _ in members]
    for var in chain.from_iterable(reads):
        if var in maker:
            written[stage_of[maker[var]]][var] = None
    number = {var: n for n, var in enumerate(chain(jaxpr.invars, *written))}
    passing = set(map(jaxpr.outvars.__getitem__, between))
    differs = flow(
        jaxpr,
        [number in per_replica for number in range(len(jaxpr.invars))],
        lambda eqn, inputs: [any(inputs) or _is_of_a_replica(eqn)] * len(eqn.outvars),
        lambda atom: False,
    )
    functions = dict[Any, Callable[..., list[Any]]]()

    def stage(k: int) -> Stage:
        positions, need = extended[k]
        result = [x for x in results[k] if isinstance(x, Literal) or x not in passing]
        body = make_program(
            program,
            list(map(jaxpr.eqns.__getitem__, positions)),
            reads[k],
            [*written[k], *result],
            {var: consts[var] for var in need if var in consts},
        )
        return Stage(
            run=functions.setdefault(form_of_program(body), jaxpr_as_fun(body)),
            reads=tuple(map(number.__getitem__, reads[k])),
            writes=tuple(map(number.__getitem__, written[k])),
            results=len(result),
            alike=tuple(not differs(var) for var in written[k]),
            between=tuple(map(passing.__contains__, written[k])),
            speaks=bool(collectives(body)),
            acts=any(map(acts, body.jaxpr.eqns)),
        )

    return tuple(map(stage, range(len(members))))


def arrivals(closed: ClosedJaxpr, input_arrivals: Mapping[int, int]) -> list[int]:
    """Finds when each output of a program can be computed: the last arrival of its inputs.

    `input_arrivals` maps the position of an input to its time of arrival, 0 if omitted.

    >>> import jax
    >>> arrivals(jax.make_jaxpr(lambda a, b, c: (a + b, c, a * c))(1.0, 2.0, 3.0), {1: 1, 2: 2})
    [1, 2, 2]
    """
    jaxpr = straighten(closed).jaxpr
    return list(map(arrival(jaxpr, input_arrivals), jaxpr.outvars))


def take_more(closed: ClosedJaxpr, outputs: Sequence[int]) -> bool:
    """Returns True if some outputs of a program need products or loops that no other output needs.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: ((y := jnp.sin(x)), jnp.cos(y), jnp.dot(y, y))
    >>> program = jax.make_jaxpr(f)(jnp.ones(3))
    >>> take_more(program, [1]), take_more(program, [2])
    (False, True)
    """
    jaxpr = straighten(closed).jaxpr
    chosen, unchosen = split_leaves(outputs, jaxpr.outvars)
    # `_members` gives equations of pure effect (a print) to the last group, which is empty here.
    _, exclusive, _ = _members(jaxpr, [unchosen, chosen, []], maker_positions(jaxpr))
    eqns = map(jaxpr.eqns.__getitem__, exclusive)
    return any(eqn.primitive.name in PRODUCTS or inner_programs(eqn) for eqn in eqns)


def _is_of_a_replica(eqn: JaxprEqn) -> bool:
    """Returns True if an equation's results may differ between replicas with equal inputs."""
    return acts(eqn) or eqn.primitive.name in OF_A_REPLICA or bool(inner_programs(eqn))


def _by_arrival(
    jaxpr: Jaxpr,
    members: Sequence[set[int]],
    results: Sequence[Sequence[Var | Literal]],
    when: Callable[[Var | Literal], int],
) -> tuple[list[set[int]], list[Sequence[Any]]]:
    """Splits each group's equations by arrival; the group's last stage has all its results."""
    stages = list[set[int]]()
    stage_results = list[Sequence[Any]]()
    latest = 0
    for positions, result in zip(members, results):
        by_time = dict[int, set[int]]()
        times = dict[Var, int]()
        acting = list[tuple[JaxprEqn, int]]()
        for position in sorted(positions):
            eqn = jaxpr.eqns[position]
            inputs = [times.get(var, when(var)) for var in variables(eqn.invars)]
            # Effects stay in order.
            earlier = [time for other, time in acting if acts_alike(eqn, other)]
            time = max([latest, *inputs, *earlier])
            times.update(dict.fromkeys(eqn.outvars, time))
            if acts(eqn):
                acting.append((eqn, time))
            by_time.setdefault(time, set()).add(position)
        latest = max([latest, *map(when, result), *by_time])
        for time in sorted({*by_time, latest}):
            stages.append(by_time.get(time, set()))
            stage_results.append(result if time == latest else ())
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
        pending = _makers(maker, result)
        if k == len(results) - 1:
            pending += acting
        positions: set[int] = set()
        while pending:
            at = pending.pop()
            if at not in assigned and at not in positions:
                positions.add(at)
                eqn = jaxpr.eqns[at]
                pending += _makers(maker, eqn.invars)
                # Effects stay in order.
                pending += [a for a in acting if a < at and acts_alike(eqn, jaxpr.eqns[a])]
        assigned |= positions
        members.append(positions)
    return members


def _makers(maker: Mapping[Var, int], atoms: Iterable[Var | Literal]) -> list[int]:
    return [maker[var] for var in variables(atoms) if var in maker]


def _remade(
    jaxpr: Jaxpr, maker: Mapping[Var, int], positions: set[int], result: Sequence[Var | Literal]
) -> tuple[list[int], list[Var]]:
    """Adds cheap equations to a stage, to recompute values instead of reading them.

    Returns the positions of all its equations, and the values that it reads.
    """
    extended = set(positions)
    read = read_by(map(jaxpr.eqns.__getitem__, sorted(positions)))
    inputs = {v: None for v in (*read, *variables(result)) if maker.get(v) not in positions}
    available = {*jaxpr.constvars, *jaxpr.invars}
    need: list[Var] = []
    # The value computed last goes first: its sources were computed before it.
    queue = [(-maker.get(var, -1), k, var) for k, var in enumerate(inputs)]
    heapify(queue)
    pushed = count(len(queue))
    while queue:
        *_, var = heappop(queue)
        del inputs[var]
        if var in maker and cheap(eqn := jaxpr.eqns[maker[var]]):
            sources = read_by([eqn])
            extra = set(sources) - inputs.keys() - available
            if sum(map(_nbytes, extra)) <= _nbytes(var):
                extended.add(maker[var])
                for source in filterfalse(inputs.__contains__, dict.fromkeys(sources)):
                    inputs[source] = None
                    heappush(queue, (-maker.get(source, -1), next(pushed), source))
                continue
        need.append(var)
    return sorted(extended), need


def _nbytes(var: Var) -> int:
    return form_of(var).size * form_of(var).dtype.itemsize
