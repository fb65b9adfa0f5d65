"""A program cut where its results become ready, so that each can leave while the rest still runs.

Source: `DDPOptimizer` in TorchDynamo, which splits a compiled graph at bucket boundaries.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fddp.program import straighten


@dataclass(frozen=True)
class Stage:
    """A part of a program that can run once what it reads is there."""

    run: Callable[..., list[Any]]
    """`run(*values read)` → [*values written, *results]."""
    reads: tuple[int, ...]
    """Numbers of the values it reads: the program's inputs come first, then what stages write."""
    writes: tuple[int, ...]
    """Numbers of the values that it writes for later stages."""
    frees: tuple[int, ...]
    """Numbers of the values that no later stage reads."""


def cut(closed: ClosedJaxpr, groups: Sequence[int]) -> tuple[Stage, ...]:
    """Cuts a program into stages, one for each group of its outputs.

    Stage k holds the equations that group k needs and no earlier stage has, in their order: nothing is computed twice,
    and nothing early that only a later group needs.

    Args:
      closed: the program.
      groups: how many outputs each group has, in the order in which they are to be ready.

    Returns:
      The stages; the results of stage k are the outputs of group k.

    Raises:
      ValueError: the groups do not have as many outputs as the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: ((y := jnp.sin(x)), jnp.cos(y)))(1.0)
      >>> [(stage.reads, stage.writes) for stage in cut(program, [1, 1])]
      [((0,), (1,)), ((1,), ())]
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    if sum(groups) != len(jaxpr.outvars):
        raise ValueError(f"groups must hold the program's {len(jaxpr.outvars)} outputs, got {list(groups)}.")
    results = [jaxpr.outvars[a:b] for a, b in pairwise(accumulate(groups, initial=0))]
    parts = _parts(jaxpr, results)

    consts = dict(zip(jaxpr.constvars, program.consts))
    inner = [{var for eqn in part for var in eqn.outvars} for part in parts]
    needs = [
        _ordered(v for v in _read(part, result) if v not in own and v not in consts)
        for part, result, own in zip(parts, results, inner)
    ]
    # What a stage hands on: values of its own that a later one reads.
    gives = [_ordered(v for later in needs[k + 1 :] for v in later if v in own) for k, own in enumerate(inner)]
    number = {var: n for n, var in enumerate([*jaxpr.invars, *(v for given in gives for v in given)])}
    last = {var: k for k, need in enumerate(needs) for var in need}

    def stage(k: int) -> Stage:
        used = [v for v in _ordered(_read(parts[k], results[k])) if v in consts]
        effects = frozenset().union(*(eqn.effects for eqn in parts[k]))
        body = Jaxpr(used, needs[k], [*gives[k], *results[k]], parts[k], effects, jaxpr.debug_info.with_unknown_names())
        return Stage(
            run=jaxpr_as_fun(ClosedJaxpr(body, [consts[v] for v in used])),
            reads=tuple(number[v] for v in needs[k]),
            writes=tuple(number[v] for v in gives[k]),
            frees=tuple(number[v] for v in needs[k] if last[v] == k),
        )

    return tuple(stage(k) for k in range(len(groups)))


def _parts(jaxpr: Jaxpr, results: Sequence[Sequence[Any]]) -> list[list[JaxprEqn]]:
    """Gives each equation to the first group that needs it; those that only act (a print) to the last."""
    maker = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    acting = [at for at, eqn in enumerate(jaxpr.eqns) if eqn.effects]
    taken: set[int] = set()
    parts: list[list[JaxprEqn]] = []
    for k, result in enumerate(results):
        pending = [maker[v] for v in result if not isinstance(v, Literal) and v in maker]
        pending += acting if k == len(results) - 1 else []
        mine: set[int] = set()
        while pending:
            at = pending.pop()
            if at not in taken and at not in mine:
                mine.add(at)
                pending += [maker[v] for v in jaxpr.eqns[at].invars if not isinstance(v, Literal) and v in maker]
        taken |= mine
        parts.append([jaxpr.eqns[at] for at in sorted(mine)])
    return parts


def _read(part: Sequence[JaxprEqn], result: Sequence[Any]) -> Iterable[Var]:
    atoms = [*(atom for eqn in part for atom in eqn.invars), *result]
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _ordered(items: Iterable[Var]) -> list[Var]:
    return list(dict.fromkeys(items))
