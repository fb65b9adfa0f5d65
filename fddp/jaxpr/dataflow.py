"""Propagates facts about values through a program, from its inputs to its outputs.

The caller defines a fact and its way through an equation. A fact is, for example, the leaves that a
value depends on, its number of nonzero table rows, or its time of arrival.
"""

from collections.abc import Callable, Sequence
from itertools import count as count_up
from typing import TypeVar

from fddp.jax_internals import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, scan_body
from fddp.jaxpr.equations import cheap, straighten

Fact = TypeVar("Fact")


def flow(
    jaxpr: Jaxpr,
    inputs: Sequence[Fact],
    through: Callable[[JaxprEqn, list[Fact]], Sequence[Fact]],
    source: Callable[[Var | Literal], Fact],
) -> Callable[[Var | Literal], Fact]:
    """Computes a fact about each value of a program; returns value → fact.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, y: x * y + 1.0)(1.0, 2.0).jaxpr
    >>> depth = flow(program, [0, 5], lambda eqn, depths: [max(depths) + 1], lambda literal: 0)
    >>> depth(program.outvars[0])
    7
    """
    facts: dict[Var, Fact] = dict(zip(jaxpr.invars, inputs))

    def fact(atom: Var | Literal) -> Fact:
        if isinstance(atom, Literal) or atom not in facts:
            return source(atom)
        return facts[atom]

    for eqn in jaxpr.eqns:
        facts.update(zip(eqn.outvars, through(eqn, list(map(fact, eqn.invars)))))
    return fact


def inputs_of_outputs(closed: ClosedJaxpr) -> list[frozenset[int]]:
    """Finds the inputs that each output of a program may depend on.

    >>> import jax
    >>> inputs_of_outputs(jax.make_jaxpr(lambda x, y: (x + 1.0, x * y, 3.0))(1.0, 2.0))
    [frozenset({0}), frozenset({0, 1}), frozenset()]
    """
    jaxpr = straighten(closed).jaxpr
    inputs = [frozenset([position]) for position in range(len(jaxpr.invars))]
    nothing = frozenset[int]()

    def through(eqn: JaxprEqn, sets: list[frozenset[int]]) -> list[frozenset[int]]:
        return [nothing.union(*sets)] * len(eqn.outvars)

    return list(map(flow(jaxpr, inputs, through, lambda atom: nothing), jaxpr.outvars))


def last_costly(jaxpr: Jaxpr) -> Callable[[Var | Literal], tuple[int, ...]]:
    """Returns value → place of the last costly equation that it depends on; () without one.

    A place is a position in the program, followed by one in the body of a loop, if that is a loop.
    """
    positions = count_up()

    def through(eqn: JaxprEqn, inputs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        position = next(positions)
        if cheap(eqn):
            return [max(inputs, default=())] * len(eqn.outvars)
        if eqn.primitive.name != "scan":
            return [(position,)] * len(eqn.outvars)
        body = straighten(scan_body(eqn)[0]).jaxpr
        return [(position, *place) for place in map(last_costly(body), body.outvars)]

    return flow(jaxpr, [()] * len(jaxpr.invars), through, lambda atom: ())
