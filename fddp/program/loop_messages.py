"""Starts the messages of a loop inside it, and receives them behind it.

The loop over layers of a backward pass sums a layer in each round. Its message travels while the
next rounds compute; a stack of numbers leads from the starts in the loop to the end behind it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fddp.jax_internals import JaxprEqn, loop_parts, named_as, scan_body
from fddp.jaxpr import Read, flow, interpret, straighten
from fddp.program.exchange import exchange_p
from fddp.program.late import split_late
from fddp.program.program_messages import receives


def received_behind_loops(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose loops receive their messages at their end, where they can.

    The function, of trees of arrays, is to be traced.
    """

    def behind(*args: Any) -> Any:
        closed, forms = jax.make_jaxpr(f, return_shape=True)(*args)
        outputs = interpret(straighten(closed), jax.tree.leaves(args), _run)
        return jax.tree.unflatten(jax.tree.structure(forms), outputs)

    return behind


def _run(eqn: JaxprEqn, read: Read) -> Sequence[Any] | None:
    """Runs a loop that starts its messages; None if a round needs those of an earlier one."""
    if eqn.primitive.name != "scan" or not receives(eqn):
        return None
    consts, carry, rows = loop_parts(eqn, list(map(read, eqn.invars)))
    body, how = scan_body(eqn)
    body = straighten(body)
    jaxpr = body.jaxpr

    def waits(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
        return [eqn.primitive is exchange_p or any(inputs)] * len(eqn.outvars)

    waiting = flow(jaxpr, [False] * len(jaxpr.invars), waits, lambda atom: False)
    late = {k for k, atom in enumerate(jaxpr.outvars) if waiting(atom)}
    if not late or min(late) < len(carry):
        return None
    split = split_late(body, [k for k in range(len(jaxpr.outvars)) if k not in late], len(consts))
    if any(receives(split.program.jaxpr.eqns[at]) for at in split.after):
        return None

    def round_of(state: list[Any], row: list[Any]) -> tuple[list[Any], Any]:
        outputs, computed = split.first(*consts, *state, *row)
        return outputs[: len(carry)], (outputs[len(carry) :], computed)

    with named_as(eqn):
        carry, (stacks, computed) = jax.lax.scan(round_of, carry, rows, **how)
        received = split.received(computed, how["length"])
        passed = [consts[k] for k in split.passed]
        late_stacks = jax.vmap(lambda *computed: split.rest(passed, computed))(*received)
    early = iter([*carry, *stacks])
    behind = iter(late_stacks)
    return [next(behind if k in late else early) for k in range(len(jaxpr.outvars))]
