"""The programs of a step before they are cut into stages: each round, and the update behind the
last round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from fddp.comm import Placement, trace, trace_again
from fddp.hooks import Reduction
from fddp.jax_internals import ClosedJaxpr, Literal
from fddp.jaxpr import in_rounds
from fddp.schedules.communications import communications, inputs_of, sums_of
from fddp.schedules.pieces import ARGUMENTS, Pieces
from fddp.schedules.tasks import Communicate
from fddp.schedules.values import BEGIN, BYTES, HANDED, NEW, RESULT, SHARDS, STATE, Value, names_of


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


def traced_programs(
    placement: Placement, pieces: Pieces, arguments: Sequence[Any]
) -> tuple[list[Program], list[list[Communicate]], Any]:
    """Returns the traced programs, the messages of each round, and the tree of the result."""
    names = {word: names_of(word, tree) for word, tree in zip(ARGUMENTS, arguments)}
    sends = communications([piece.reductions for piece in pieces.rounds])
    *rounds, update = _traced_pieces(placement, pieces, arguments, _forms_of_sums)
    programs = list[Program]()
    returned = list[Value]()
    sums = range(0)

    def inputs_of_piece(words: Sequence[str]) -> tuple[list[Value], dict[int, int]]:
        """The names of a piece's inputs, and the positions of sums among them."""
        reads = [name for word in words for name in names[word]]
        return [*reads, *returned], {len(reads) + k: k for k in sums}

    for piece, leaving, (closed, (messages, saved)) in zip(pieces.rounds, sends, rounds):
        reads, positions = inputs_of_piece(piece.reads)
        first = len(jax.tree.leaves(messages))
        saved_names = _saved(closed, reads, first, names_of(f"kept by {piece.name}", saved))
        writes = [*inputs_of(leaving), *saved_names]
        programs.append(Program(piece.name, piece.kind, closed, reads, positions, writes))
        returned = [*sums_of(leaving), *saved_names]
        sums = range(len(leaving))

    closed, (result, new) = update
    reads, positions = inputs_of_piece((STATE, SHARDS))
    results = [*names_of(RESULT, result), *names_of(NEW, new)]
    last = Program(pieces.name, "update", closed, [*reads, BYTES], positions, results)
    alias = _new_shards_of(last)
    programs = [_renamed(program, alias) for program in (*programs, last)]
    return programs, sends, jax.tree.structure((result, new))


def _traced_pieces(
    placement: Placement,
    pieces: Pieces,
    arguments: Sequence[Any],
    sums_of_round: Callable[[Sequence[Reduction], Sequence[Any]], Sequence[Any]],
) -> Iterator[tuple[ClosedJaxpr, Any]]:
    """Traces each round and the update, and yields its program and the shapes of its results."""
    by_word: dict[str, Any] = dict(zip(ARGUMENTS, arguments))
    received: tuple[Any, Any] = (None, None)
    for piece in pieces.rounds:
        inputs = map(by_word.__getitem__, piece.reads)
        closed, (messages, saved) = trace(placement, piece.run, *inputs, *received)
        yield closed, (messages, saved)
        sums = sums_of_round(piece.reductions, messages.arrays)
        received = replace(messages, arrays=tuple(sums)), saved
    nbytes = jax.ShapeDtypeStruct((len(pieces.reductions),), np.uint32)
    yield trace(placement, pieces.finish, by_word[STATE], by_word[SHARDS], *received, nbytes)


def _forms_of_sums(reductions: Sequence[Reduction], messages: Sequence[Any]) -> Sequence[Any]:
    return [r.collective.result_form(message) for r, message in zip(reductions, messages)]


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


def _saved(
    closed: ClosedJaxpr, reads: Sequence[Value], first: int, names: Sequence[Value]
) -> list[Value]:
    """Names the outputs from `first` on; an output that is an input unchanged keeps that name."""
    inputs = dict(zip(closed.jaxpr.invars, reads))
    saved = list(names)
    for at, var in enumerate(closed.jaxpr.outvars[first:]):
        if not isinstance(var, Literal):
            saved[at] = inputs.get(var, saved[at])
    return saved


def _new_shards_of(update: Program) -> dict[Value, Value]:
    """Name of an input that the update returns unchanged as a new shard → name of that shard."""
    inputs = dict(zip(update.closed.jaxpr.invars, update.reads))
    alias = dict[Value, Value]()
    for var, name in zip(update.closed.jaxpr.outvars, update.writes):
        if name.kind != NEW or isinstance(var, Literal) or var not in inputs:
            continue
        if inputs[var].kind not in (STATE, SHARDS):
            alias.setdefault(inputs[var], name)
    return alias


def _renamed(program: Program, alias: Mapping[Value, Value]) -> Program:
    reads = [alias.get(name, name) for name in program.reads]
    writes = [alias.get(name, name) for name in program.writes]
    return program._replace(reads=reads, writes=writes)
