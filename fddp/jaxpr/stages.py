"""Cuts a program into stages where its results become ready, so that each can be sent while the rest still runs.

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
    """A part of a program that can run as soon as the values that it reads are there."""

    run: Callable[..., list[Any]]
    """`run(*values read)` → [*values written, *results]."""
    reads: tuple[int, ...]
    """Numbers of the values it reads: the program's inputs come first, then what stages write."""
    writes: tuple[int, ...]
    """Numbers of the values that it writes for later stages."""
    results: int
    """Number of the program's outputs that it makes."""
    alike: tuple[bool, ...] = ()
    """Marks the values that it writes of which all replicas make the same."""
    between: tuple[bool, ...] = ()
    """Marks the values that it writes which are outputs that are no results."""
    speaks: bool = False
    """Whether it holds collectives."""


def cut(
    closed: ClosedJaxpr,
    groups: Sequence[int],
    comes: Mapping[int, int] | None = None,
    own: Sequence[int] = (),
    between: Sequence[int] = (),
) -> tuple[Stage, ...]:
    """Cuts a program into stages, one for each group of its outputs, and more where its inputs come late.

    A group's stage holds, in their order, the equations that the group needs and no earlier stage has. So no stage
    computes early what only a later group needs. No equation runs twice, but for cheap ones that XLA itself would
    repeat inside a program, where that saves memory: a mask or a shifted copy is made anew from the value it came from,
    if that value is at hand or no larger. Where a group needs inputs that come one after the other, the equations whose
    inputs are there make a stage of their own: no stage waits for an input that it does not need.

    Args:
      closed: the program.
      groups: number of outputs of each group, in the order in which the groups are to be ready.
      comes: number of an input → when it comes; the others are there from 0.
      own: numbers of the inputs of which each replica has its own.
      between: numbers of outputs that are no results: they are made with their group, for later stages.

    Returns:
      The stages; their results, one stage after the other, are the outputs of one group after the other.

    Raises:
      ValueError: the groups do not have as many outputs as the program.

    Example:
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
        raise ValueError(f"groups must hold the program's {len(jaxpr.outvars)} outputs, got {list(groups)}.")
    results = [jaxpr.outvars[a:b] for a, b in pairwise(accumulate(groups, initial=0))]
    maker = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    when = _when(jaxpr, comes or {})
    members, results = _by_arrival(jaxpr, _members(jaxpr, results, maker), results, when)
    pairs = [_remade(jaxpr, own, result, maker) for own, result in zip(members, results)]
    passing = {jaxpr.outvars[number] for number in between}
    results = [[v for v in result if isinstance(v, Literal) or v not in passing] for result in results]
    consts = dict(zip(jaxpr.constvars, program.consts))
    needs = [[v for v in need if v not in consts] for _, need in pairs]
    # A stage hands on the values of its own that a later stage reads.
    gives = [
        _ordered(v for need in needs[k + 1 :] for v in need if maker.get(v) in own) for k, own in enumerate(members)
    ]
    differs = flow(
        jaxpr,
        [number in own for number in range(len(jaxpr.invars))],
        lambda eqn, given: [any(given) or _is_of_a_replica(eqn)] * len(eqn.outvars),
        lambda atom: False,
    )
    number = {var: n for n, var in enumerate([*jaxpr.invars, *(v for given in gives for v in given)])}
    known = dict[Any, Callable[..., list[Any]]]()

    def stage(k: int) -> Stage:
        part, need = pairs[k]
        used = [v for v in need if v in consts]
        eqns = [jaxpr.eqns[at] for at in part]
        body = make_program(program, eqns, needs[k], [*gives[k], *results[k]], {v: consts[v] for v in used})
        return Stage(
            run=known.setdefault(form_of_program(body), jaxpr_as_fun(body)),
            reads=tuple(number[v] for v in needs[k]),
            writes=tuple(number[v] for v in gives[k]),
            results=len(results[k]),
            alike=tuple(not differs(v) for v in gives[k]),
            between=tuple(v in passing for v in gives[k]),
            speaks=bool(collectives(body)),
        )

    return tuple(stage(k) for k in range(len(members)))


def arrivals(closed: ClosedJaxpr, inputs: Mapping[int, int]) -> list[int]:
    """Finds when each output of a program can be made, if its inputs come one after the other.

    Args:
      closed: the program.
      inputs: number of an input → when it comes; the others are there from 0.

    Returns:
      For each output, when the last input that it needs comes.

    Example:
      >>> import jax
      >>> arrivals(jax.make_jaxpr(lambda a, b, c: (a + b, c, a * c))(1.0, 2.0, 3.0), {1: 1, 2: 2})
      [1, 2, 2]
    """
    jaxpr = straighten(closed).jaxpr
    when = _when(jaxpr, inputs)
    return [when([atom]) for atom in jaxpr.outvars]


def take_more(closed: ClosedJaxpr, outputs: Sequence[int]) -> bool:
    """Whether some outputs of a program need products or loops that no other output needs.

    Args:
      closed: the program.
      outputs: numbers of outputs.

    Returns:
      Whether there is a product or a loop for them alone.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: ((y := jnp.sin(x)), jnp.cos(y), jnp.dot(y, y)))(jnp.ones(3))
      >>> take_more(program, [1]), take_more(program, [2])
      (False, True)
    """
    jaxpr = straighten(closed).jaxpr
    others, these = (
        [var for k, var in enumerate(jaxpr.outvars) if (k in outputs) == inside] for inside in (False, True)
    )
    maker = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    # `_members` gives equations that only act (a print) to the last group, which is empty here.
    _, alone, _ = _members(jaxpr, [others, these, []], maker)
    return any(jaxpr.eqns[at].primitive.name in PRODUCTS or inner_programs(jaxpr.eqns[at]) for at in alone)


def _is_of_a_replica(eqn: JaxprEqn) -> bool:
    """Whether an equation's results may differ between replicas, whatever it is given."""
    return acts(eqn) or eqn.primitive.name in OF_A_REPLICA or bool(inner_programs(eqn))


def _when(jaxpr: Jaxpr, inputs: Mapping[int, int]) -> Callable[[Iterable[Any]], int]:
    """Finds when the last of some values can be made; those that wait for no input can be from 0."""
    of = arrival(jaxpr, inputs)
    return lambda atoms: max(map(of, atoms), default=0)


def _by_arrival(
    jaxpr: Jaxpr,
    members: Sequence[set[int]],
    results: Sequence[Sequence[Any]],
    when: Callable[[Iterable[Any]], int],
) -> tuple[list[set[int]], list[Sequence[Any]]]:
    """Splits each group's equations by the inputs that they wait for; the last of these stages has all its results."""
    parts = list[set[int]]()
    made = list[Sequence[Any]]()
    latest = 0
    for own, result in zip(members, results):
        waits = {at: max(latest, when(jaxpr.eqns[at].invars)) for at in own}
        latest = max([latest, when(result), *waits.values()])
        for stop in sorted({*waits.values(), latest}):
            parts.append({at for at in own if waits[at] == stop})
            made.append(result if stop == latest else ())
    return parts, made


def _members(jaxpr: Jaxpr, results: Sequence[Sequence[Any]], maker: Mapping[Var, int]) -> list[set[int]]:
    """Gives each equation to the first group that needs it; those that only act (a print) to the last.

    One that acts, and is needed, takes those with it that have acted before.
    """
    acting = [at for at, eqn in enumerate(jaxpr.eqns) if acts(eqn)]
    taken: set[int] = set()
    members: list[set[int]] = []
    for k, result in enumerate(results):
        pending = [maker[v] for v in variables(result) if v in maker]
        pending += acting if k == len(results) - 1 else []
        own: set[int] = set()
        while pending:
            at = pending.pop()
            if at not in taken and at not in own:
                own.add(at)
                pending += [maker[v] for v in variables(jaxpr.eqns[at].invars) if v in maker]
                # What acts on the world in order does so after what acts on it before.
                pending += [a for a in acting if a < at and jaxpr.eqns[a].effects & jaxpr.eqns[at].effects]
        taken |= own
        members.append(own)
    return members


def _remade(
    jaxpr: Jaxpr, own: set[int], result: Sequence[Any], maker: Mapping[Var, int]
) -> tuple[list[int], list[Var]]:
    """Adds to a stage the equations of cheap values that it makes anew; gives all, and the values that it must read."""
    part = set(own)
    atoms = [*(atom for at in sorted(own) for atom in jaxpr.eqns[at].invars), *result]
    wanted = {v: None for v in variables(atoms) if maker.get(v) not in own}
    at_hand = {*jaxpr.constvars, *jaxpr.invars}
    need: list[Var] = []
    while wanted:
        # The value that was made last comes first: the values it is made of were made before it.
        var = max(wanted, key=lambda v: maker.get(v, -1))
        del wanted[var]
        eqn = jaxpr.eqns[maker[var]] if var in maker else None
        sources = _ordered(variables(eqn.invars)) if eqn is not None else []
        extra = sum(_nbytes(v) for v in sources if v not in wanted and v not in at_hand)
        if eqn is not None and cheap(eqn) and extra <= _nbytes(var):
            part.add(maker[var])
            wanted.update(dict.fromkeys(sources))
        else:
            need.append(var)
    return sorted(part), need


def _nbytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]


def _ordered(items: Iterable[Var]) -> list[Var]:
    return list(dict.fromkeys(items))
