"""Loops and branches with messages: the token is part of their carry."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from fddp.jax_internals import (
    CALLS,
    ClosedJaxpr,
    JaxprEqn,
    branches,
    called_program,
    loop_parts,
    run_while,
    scan_body,
    while_programs,
)
from fddp.jaxpr import interpret
from fddp.program.program_messages import has_messages

Run: TypeAlias = Callable[[ClosedJaxpr, jax.Array, Sequence[Any]], tuple[jax.Array, list[Any]]]


def run_inner(
    eqn: JaxprEqn, token: jax.Array, args: Sequence[Any], run_program: Run
) -> tuple[jax.Array, Sequence[Any]]:
    """Runs an equation whose programs have messages, each by `run_program`."""

    def run(closed: ClosedJaxpr, token: jax.Array, *args: Any) -> tuple[jax.Array, list[Any]]:
        return run_program(closed, token, args)

    name = eqn.primitive.name
    if name == "scan":
        consts, carry, rows = loop_parts(eqn, args)
        body, how = scan_body(eqn)

        def round_of(state: tuple[Any, ...], row: Any) -> tuple[Any, Any]:
            token, outputs = run(body, state[0], *consts, *state[1:], *row)
            return (token, *outputs[: len(carry)]), outputs[len(carry) :]

        (token, *carry), stacks = jax.lax.scan(round_of, (token, *carry), rows, **how)
        return token, [*carry, *stacks]
    if name == "cond":
        each = [lambda *inputs, branch=branch: run(branch, *inputs) for branch in branches(eqn)]
        return jax.lax.switch(args[0], each, token, *args[1:])
    if name == "while":
        test_consts, consts, carry = loop_parts(eqn, args)
        test, body = while_programs(eqn)
        if has_messages(test.jaxpr):
            raise ValueError(
                "the condition of a while loop has a collective: compute it in the loop's body, "
                "and carry it."
            )
        carry, token = run_while(
            eqn,
            lambda state, token: interpret(test, [*test_consts, *state], lambda eqn, read: None)[0],
            lambda state, token: run(body, token, *consts, *state)[::-1],
            carry,
            token,
        )
        return token, carry
    if name in CALLS:
        return run(called_program(eqn), token, *args)
    raise ValueError(
        f"the loss has a collective inside of {name}, where this backend cannot run it."
    )
