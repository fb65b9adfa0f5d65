"""Translates the collectives of a program into those of a transport that XLA does not know.

JAX writes `psum` and its like as equations over a named axis, and XLA carries them out over a mesh. Where replicas have
no mesh, such an equation is carried out by the transport's own operations, wherever it stands: in the program itself,
in the body of a loop, in a branch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax

from fddp.jax_internals import (
    CALLS,
    REMATERIALISED,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    axes_of,
    barrier_before,
    branches,
    called_program,
    inner_programs,
    jaxpr_as_fun,
    loop_parts,
    run_as_it_is,
    run_while,
    scan_body,
    while_programs,
)

# (equation, its arguments) → its results
Carry: TypeAlias = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]
# What carries out a collective over the replicas' axis, by the name of its primitive.
Words: TypeAlias = Mapping[str, Carry]


def speaks(jaxpr: Jaxpr, axis_name: str) -> bool:
    """Whether a program has equations over an axis, at any depth."""
    return any(_over(eqn, axis_name) for eqn in jaxpr.eqns)


def run_translated(closed: ClosedJaxpr, args: Sequence[Any], axis_name: str, words: Words) -> list[Any]:
    """Runs a program whose collectives over an axis a transport carries out.

    Args:
      closed: the program; its derivatives are in it, and nobody takes others.
      args: its arguments.
      axis_name: the axis.
      words: the transport's word for each collective.

    Returns:
      Its results.

    Raises:
      ValueError: the transport has no word for one of the collectives.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = {**dict(zip(jaxpr.constvars, closed.consts)), **dict(zip(jaxpr.invars, args))}

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    run = partial(run_translated, axis_name=axis_name, words=words)
    for eqn in jaxpr.eqns:
        given = [value(atom) for atom in eqn.invars]
        if not _over(eqn, axis_name):
            made = run_as_it_is(closed, eqn, given)
        elif inner_programs(eqn):
            made = _inside(run, eqn, given)
        elif eqn.primitive.name in words:
            made = words[eqn.primitive.name](eqn, given)
        else:
            raise ValueError(
                f"the loss has the collective {eqn.primitive.name} over {axis_name!r}, for which this backend has no "
                "word: use backend 'gloo' or 'nccl'."
            )
        values.update(zip(eqn.outvars, made))
    return [value(atom) for atom in jaxpr.outvars]


def _over(eqn: JaxprEqn, axis_name: str) -> bool:
    inner = inner_programs(eqn)
    return any(speaks(body, axis_name) for body in inner) if inner else axis_name in axes_of(eqn)


def _inside(run: Callable[..., list[Any]], eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation whose programs hold collectives."""
    name = eqn.primitive.name
    if name == "cond":
        each = [lambda *given, branch=branch: run(branch, given) for branch in branches(eqn)]
        return jax.lax.switch(args[0], each, *args[1:])
    if name == "scan":
        return _scan(run, eqn, args)
    if name == "while":
        of_test, consts, carry = loop_parts(eqn, args)
        test, body = while_programs(eqn)
        return run_while(
            eqn,
            lambda state, _: run(test, [*of_test, *state])[0],
            lambda state, _: (run(body, [*consts, *state]), ()),
            carry,
        )[0]
    if name not in CALLS:
        raise ValueError(f"the loss has a collective inside of {name}, where this backend cannot carry it out.")
    handed = jaxpr_as_fun(barrier_before(eqn))(*args) if name in REMATERIALISED else args
    return run(called_program(eqn), handed)


def _scan(run: Callable[..., list[Any]], eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    consts, carry, rows = loop_parts(eqn, args)
    closed, options = scan_body(eqn)

    def body(state: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        made = run(closed, [*consts, *state, *row])
        return made[: len(carry)], made[len(carry) :]

    ends, made = jax.lax.scan(body, carry, rows, **options)
    return [*ends, *made]
