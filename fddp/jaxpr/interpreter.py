"""Runs a program equation by equation, some of its equations by a rule.

Under a trace, such a run rewrites the program.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    CALLS,
    REMATERIALISED,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    barrier_before,
    branches,
    called_program,
    jaxpr_as_fun,
    loop_parts,
    named_as,
    run_again,
    run_while,
    scan_body,
    while_programs,
)
from fddp.jaxpr.equations import form_of

Read: TypeAlias = Callable[[Var | Literal], Any]
"""Variable or literal → its value."""
Rule: TypeAlias = Callable[[JaxprEqn, Read], Sequence[Any] | None]
"""(equation, values of its inputs) → its outputs, or None to run the equation unchanged."""
Run: TypeAlias = Callable[[ClosedJaxpr, Any, Sequence[Any]], tuple[Any, Sequence[Any]]]
"""(program, state, inputs) → (state, outputs)."""


def interpret(closed: ClosedJaxpr, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Runs a program, with `rule` for its equations; returns the outputs.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: jax.numpy.sin(x) + 1.0)(2.0)
    >>> rule = lambda eqn, read: [read(eqn.invars[0])] if eqn.primitive.name == "sin" else None
    >>> float(interpret(program, [2.0], rule)[0])
    3.0
    """
    values = Values(closed, args)
    values.run(closed.jaxpr.eqns, rule)
    return values.read_all(closed.jaxpr.outvars)


def run_inner(
    eqn: JaxprEqn, args: Sequence[Any], run: Run, state: Any = ()
) -> tuple[Any, Sequence[Any]]:
    """Runs an equation, with `run` for its programs; a state passes through them in order."""
    name = eqn.primitive.name
    if name == "cond":
        each = [lambda state, *inputs, b=b: run(b, state, inputs) for b in branches(eqn)]
        return jax.lax.switch(args[0], each, state, *args[1:])
    if name == "scan":
        consts, carry, rows = loop_parts(eqn, args)
        body, how = scan_body(eqn)

        def round_of(before: tuple[Any, Any], row: Any) -> tuple[Any, Any]:
            state, outputs = run(body, before[0], [*consts, *before[1], *row])
            return (state, outputs[: len(carry)]), outputs[len(carry) :]

        with named_as(eqn):
            (state, carry), stacks = jax.lax.scan(round_of, (state, carry), rows, **how)
        return state, [*carry, *stacks]
    if name == "while":
        test_consts, consts, carry = loop_parts(eqn, args)
        test, body = while_programs(eqn)
        carry, state = run_while(
            eqn,
            lambda carry, state: run(test, state, [*test_consts, *carry])[1][0],
            lambda carry, state: run(body, state, [*consts, *carry])[::-1],
            carry,
            state,
        )
        return state, carry
    if name not in CALLS:
        raise ValueError(
            f"the loss has a collective inside of {name}, where this backend cannot run it."
        )
    inputs = jaxpr_as_fun(barrier_before(eqn))(*args) if name in REMATERIALISED else args
    return run(called_program(eqn), state, inputs)


class Values(dict[Var, Any]):
    """The values of a program's variables, as far as its equations have run."""

    def __init__(self, program: ClosedJaxpr, args: Sequence[Any]) -> None:
        super().__init__(zip(program.jaxpr.constvars, program.consts))
        self.update(zip(program.jaxpr.invars, args))
        self._program = program

    def run(self, eqns: Iterable[JaxprEqn], rule: Rule = lambda eqn, read: None) -> None:
        """Runs equations of the program in order, by `rule`."""
        for eqn in eqns:
            outputs = rule(eqn, self.read)
            if outputs is None:
                outputs = run_again(eqn, self.read_all(eqn.invars))
            self.update(zip(eqn.outvars, outputs))

    def outputs(self, positions: Iterable[int] | None = None) -> list[Any]:
        """Returns the program's outputs, or those at `positions`, literals as arrays."""
        outvars = self._program.jaxpr.outvars
        return [
            jnp.asarray(atom.val, form_of(atom).dtype)
            if isinstance(atom, Literal)
            else self.read(atom)
            for atom in (outvars if positions is None else map(outvars.__getitem__, positions))
        ]

    def read(self, atom: Var | Literal) -> Any:
        """Returns the value of a variable or a literal."""
        return atom.val if isinstance(atom, Literal) else self[atom]

    def read_all(self, atoms: Iterable[Var | Literal]) -> list[Any]:
        """Returns the values of variables and literals."""
        return list(map(self.read, atoms))
