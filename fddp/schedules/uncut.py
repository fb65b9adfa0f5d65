"""The programs of a step before they are cut into stages: each round, and the update behind the
last round."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from fddp.comm import Placement, trace_again
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import in_rounds
from fddp.schedules.tasks import BEGIN, HANDED, Value


class Program(NamedTuple):
    """A traced round or update."""

    name: str
    kind: str
    closed: ClosedJaxpr
    reads: list[Value]
    """Its inputs."""
    sums: dict[int, int]
    """Position of an input → number of the message that it sums, from 0."""
    writes: list[Value]
    """Its outputs."""
    begins: tuple[int, ...] = ()
    """Its trailing inputs: the offsets at which the slices of its split loops begin."""


# (the first round, the update) → inputs of the first round that are not ready when a step starts,
# and their order of arrival, from 1.
Late: TypeAlias = Callable[[Program, Program], Mapping[Value, int]]


def all_ready(first: Program, update: Program) -> Mapping[Value, int]:
    """All inputs are ready when a step starts."""
    del first, update
    return {}


def with_split_loops(placement: Placement, program: Program) -> Program:
    """Splits loops whose outputs are sent, or whose inputs arrive, slice by slice."""
    positions = {name: at for at, name in enumerate(program.reads)}
    replaced = {k: name.replaces for k, name in enumerate(program.writes)}
    onto = {k: positions[name] for k, name in replaced.items() if name and name in positions}
    closed, begins = shorter_loops(placement, program.closed, onto, arrival_times(program))
    reads = [*program.reads, *(Value(BEGIN, begin) for begin in begins)]
    extra = range(len(closed.jaxpr.outvars) - len(program.writes))
    writes = [*program.writes, *(Value(HANDED, number) for number in extra)]
    return program._replace(closed=closed, reads=reads, writes=writes, begins=begins)


def shorter_loops(
    placement: Placement, closed: ClosedJaxpr, onto: Mapping[int, int], arrivals: Mapping[int, int]
) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """Traces a program again with its loops split into shorter ones, one per slice.

    `onto` and `arrivals` are those of `in_rounds`. Returns the program and the offsets of slices
    that it takes as trailing inputs; a program without slices is returned unchanged.
    """
    rounds = in_rounds(closed, onto, arrivals)
    if rounds is None:
        return closed, ()
    return trace_again(placement, closed, rounds.run, *map(np.int32, rounds.begins)), rounds.begins


def arrival_times(
    program: Program, late: Mapping[Value, int] = MappingProxyType({})
) -> dict[int, int]:
    """Position of each input that is not ready at first → its order of arrival, from 1."""
    times = {at: late[name] for at, name in enumerate(program.reads) if name in late}
    return times | {at: k + 1 for at, k in program.sums.items()}
