"""Runs the rounds of a loop by a function, under the loop's name."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fddp.jax_internals import JaxprEqn, loop_parts, named_as, scan_body


def run_scan(
    loop: JaxprEqn, args: Sequence[Any], rows: Any, run_round: Callable[[list[Any], Any], list[Any]]
) -> list[Any]:
    """Runs a `scan` under a trace, with `run_round` in place of its body; returns its outputs.

    `args` start with the values of the loop's constants and carry, and `rows` is a tree of arrays
    with an entry per round. `run_round` maps [*constants, *carry] and the entries of a round to the
    new carry, followed by the round's other outputs.
    """
    consts, carry, _ = loop_parts(loop, args)

    def body(state: list[Any], entries: Any) -> tuple[list[Any], list[Any]]:
        outputs = run_round([*consts, *state], entries)
        return outputs[: len(carry)], outputs[len(carry) :]

    with named_as(loop):
        state, stacks = jax.lax.scan(body, carry, rows, **scan_body(loop)[1])
    return [*state, *stacks]
