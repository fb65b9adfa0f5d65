"""Translates the collectives of a program into those of a transport unknown to XLA.

JAX writes `psum` and similar collectives as equations over a named axis, and XLA runs them over a
mesh. Replicas without a mesh run such an equation as an operation of the transport: in the program
itself, in the body of a loop, in a branch.
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
    axes_of,
    barrier_before,
    branches,
    called_program,
    inner_programs,
    jaxpr_as_fun,
    loop_parts,
    run_while,
    scan_body,
    while_programs,
)
from fddp.jaxpr import Read, interpret, run_scan

# (equation, its arguments) → its results
Carry: TypeAlias = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]
# Name of a primitive → its implementation as a collective over the replicas' axis.
Words: TypeAlias = Mapping[str, Carry]


def has_collectives(jaxpr: Jaxpr, axis_name: str) -> bool:
    """Returns True if a program has equations over an axis, at any depth."""
    return any(_over(eqn, axis_name) for eqn in jaxpr.eqns)


def run_translated(
    closed: ClosedJaxpr, args: Sequence[Any], axis_name: str, words: Words
) -> list[Any]:
    """Runs a program with the implementations `words` of its collectives over an axis.

    The program contains its derivatives, so no caller differentiates the run.
    """
    run = partial(run_translated, axis_name=axis_name, words=words)

    def translate(eqn: JaxprEqn, read: Read) -> Sequence[Any] | None:
        if not _over(eqn, axis_name):
            return None
        inputs = list(map(read, eqn.invars))
        if inner_programs(eqn):
            return _inside(run, eqn, inputs)
        name = eqn.primitive.name
        if name not in words:
            raise ValueError(
                f"the loss has the collective {name} over {axis_name!r}, which this backend does "
                "not support: use backend 'gloo' or 'nccl'."
            )
        return words[name](eqn, inputs)

    return interpret(closed, args, translate)


def _over(eqn: JaxprEqn, axis_name: str) -> bool:
    inner = inner_programs(eqn)
    if not inner:
        return axis_name in axes_of(eqn)
    return any(has_collectives(body, axis_name) for body in inner)


def _inside(run: Callable[..., list[Any]], eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation with collectives in its programs."""
    name = eqn.primitive.name
    if name == "cond":
        each = [lambda *inputs, branch=branch: run(branch, inputs) for branch in branches(eqn)]
        return jax.lax.switch(args[0], each, *args[1:])
    if name == "scan":
        rows = loop_parts(eqn, args)[2]
        body = scan_body(eqn)[0]
        return run_scan(eqn, args, rows, lambda before, row: run(body, [*before, *row]))
    if name == "while":
        test_consts, consts, carry = loop_parts(eqn, args)
        test, body = while_programs(eqn)
        return run_while(
            eqn,
            lambda state, _: run(test, [*test_consts, *state])[0],
            lambda state, _: (run(body, [*consts, *state]), ()),
            carry,
        )[0]
    if name not in CALLS:
        raise ValueError(
            f"the loss has a collective inside of {name}, where this backend cannot run it."
        )
    inputs = jaxpr_as_fun(barrier_before(eqn))(*args) if name in REMATERIALISED else args
    return run(called_program(eqn), inputs)
