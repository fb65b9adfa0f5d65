"""Three pieces of a step, and how they are launched.

`local` makes a replica's gradients and packs them, a sum over replicas makes them everybody's, `finish` uses them.
A schedule says only which of these share an XLA program and what waits for what; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fddp.flat import Wires
from fddp.member import EVERYWHERE, Member


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Wires, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    finish: Callable[[Any, Wires, Any], Any]
    """(state, what came back, what was kept) → the step's result, equal on all replicas."""


# run(state, pending, rows): state is equal everywhere, pending and rows are each replica's own.
Run = Callable[[Any, Any, Any], Any]
# (member, pieces, donate) -> run; donate: whether the step may reuse the state's memory
Schedule = Callable[[Member, Pieces, bool], Run]


def fused(member: Member, pieces: Pieces, donate: bool) -> Run:
    """One XLA program with an all-reduce per bucket in it; XLA's scheduler overlaps where it can (GPU, TPU).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner, a jitted function.
    """

    def step(state: Any, pending: Any, rows: Any) -> Any:
        wires, kept = pieces.local(state, pending, rows)
        return pieces.finish(state, jax.tree.map(member.psum, wires), kept)

    return member.program(step, (EVERYWHERE, member.own, member.own), EVERYWHERE, donate=(0,) if donate else ())


def after(member: Member, pieces: Pieces, donate: bool) -> Run:
    """The baseline: traffic starts when the backward is done, one program per all-reduce (paper, section 3.2.1).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    own = member.own
    local = member.program(pieces.local, (EVERYWHERE, own, own), own)
    reduce = member.program(member.psum, (own,), EVERYWHERE)
    finish = member.program(pieces.finish, (EVERYWHERE, EVERYWHERE, own), EVERYWHERE, donate=(0,) if donate else ())

    def run(state: Any, pending: Any, rows: Any) -> Any:
        wires, kept = jax.block_until_ready(local(state, pending, rows))
        return finish(state, jax.tree.map(reduce, wires), kept)

    return run
