"""Carries a fact about values through a program, from its inputs on.

The caller says what a fact is, and how an equation hands it on: the leaves that a value came from, the rows that it
touches, the moment at which it can be made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fddp.jax_internals import Jaxpr, JaxprEqn, Literal

Fact = TypeVar("Fact")


def flow(
    jaxpr: Jaxpr,
    inputs: Sequence[Fact],
    through: Callable[[JaxprEqn, list[Fact]], Sequence[Fact]],
    source: Callable[[Any], Fact],
) -> Callable[[Any], Fact]:
    """Finds a fact about each value of a program.

    Args:
      jaxpr: the program.
      inputs: the facts of its inputs.
      through: (equation, facts of its inputs) → facts of its outputs; called once for each equation, in their order.
      source: gives the fact of a literal or a constant.

    Returns:
      value → its fact.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x, y: x * y + 1.0)(1.0, 2.0).jaxpr
      >>> depth = flow(program, [0, 5], lambda eqn, given: [max(given) + 1], lambda literal: 0)
      >>> depth(program.outvars[0])
      7
    """
    facts: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs))

    def of(atom: Any) -> Fact:
        return facts[atom] if not isinstance(atom, Literal) and atom in facts else source(atom)

    for eqn in jaxpr.eqns:
        facts.update(zip(eqn.outvars, through(eqn, [of(atom) for atom in eqn.invars])))
    return of


def arrival(jaxpr: Jaxpr, inputs: Mapping[int, int]) -> Callable[[Any], int]:
    """Finds when a value can be made, if a program's inputs come one after the other.

    Args:
      jaxpr: the program.
      inputs: number of an input → when it comes; the others are there from 0.

    Returns:
      value → when the last input that it is made of comes.
    """
    comes = [inputs.get(number, 0) for number in range(len(jaxpr.invars))]
    return flow(jaxpr, comes, lambda eqn, given: [max(given, default=0)] * len(eqn.outvars), lambda atom: 0)
