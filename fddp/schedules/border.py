"""The programs of a step before they are cut, and the border between two steps that they cross."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fddp.comm import Placement, trace_again
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import in_rounds
from fddp.schedules.tasks import BEGIN, HANDED, Value


class Program(NamedTuple):
    """A round, or the update behind the last round, as a program that is to be cut."""

    name: str
    kind: str
    closed: ClosedJaxpr
    read: list[Value]
    """Its inputs."""
    back: dict[int, int]
    """Inputs that are messages come back: place among the inputs → the message's number, from 0."""
    made: list[Value]
    """Its outputs."""
    begins: tuple[int, ...] = ()
    """The numbers that are given behind its other inputs: where the slices begin that loops make in parts."""


class Border(NamedTuple):
    """The border between two steps, where the second one begins before all results of the first one are there."""

    first: Program
    """The first round, in parts where its loops make or are given slices."""
    last: Program
    """The update, likewise."""
    comes: Mapping[Value, int] = MappingProxyType({})
    """The names of the values that come late in the first round, and each one's place in the order in which they come,
    from 1 on. All others are there at once."""
    enter: Callable[[dict[Value, Any]], dict[Value, Any]] = dict
    """The values of the state → the values that the programs read."""
    leave: Callable[[Mapping[Value, Any]], Mapping[Value, Any]] = dict
    """The values that the programs make → the values of the next state."""


# (placement, the first round, the update) → the same programs, and what of the update comes late in the first round of
# the next step.
Late: TypeAlias = Callable[[Placement, Program, Program], Border]


def nothing_late(placement: Placement, first: Program, last: Program) -> Border:
    """All arguments of a step are there when it begins."""
    return Border(in_parts(placement, first), in_parts(placement, last))


def in_parts(placement: Placement, program: Program, late: Mapping[Value, int] = MappingProxyType({})) -> Program:
    """The same program, whose loops run in parts where their slices travel by themselves."""
    places = {name: at for at, name in enumerate(program.read)}
    replaced = {k: name.replaces for k, name in enumerate(program.made)}
    onto = {k: places[name] for k, name in replaced.items() if name and name in places}
    closed, begins = shorter_loops(placement, program.closed, onto, arriving(program, late))
    read = [*program.read, *(Value(BEGIN, begin) for begin in begins)]
    between = [Value(HANDED, number) for number in range(len(closed.jaxpr.outvars) - len(program.made))]
    return program._replace(closed=closed, read=read, made=[*program.made, *between], begins=begins)


def shorter_loops(
    placement: Placement, closed: ClosedJaxpr, onto: Mapping[int, int], comes: Mapping[int, int]
) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """Traces a program anew, its loops in parts.

    Args:
      placement: where the replicas' programs run.
      closed: the program.
      onto: as for `in_rounds`.
      comes: likewise.

    Returns:
      The program, and the numbers that it is given behind its inputs: where slices begin. A program without slices is
      returned as it is.
    """
    rounds = in_rounds(closed, onto, comes)
    if rounds is None:
        return closed, ()
    return trace_again(placement, closed, rounds.run, *map(np.int32, rounds.begins)), rounds.begins


def arriving(program: Program, late: Mapping[Value, int]) -> dict[int, int]:
    """The places among a program's inputs of those that come late, and when they come."""
    comes = {at: late[name] for at, name in enumerate(program.read) if name in late}
    return comes | {at: k + 1 for at, k in program.back.items()}
