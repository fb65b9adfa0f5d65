"""Gathers a program's weights in groups, shortly before each pass reads them.

A group of weights is read in the forward pass, and again, in reverse order, in the backward pass.
In between it is not needed. Cheap values computed from weights alone, such as a 16-bit copy, are
recomputed after the second gather, or they would outlive the weights. If only loops read a stack of
layers, each round receives its own layer.

Source: PyTorch's FSDP2, whose `reshard_after_forward` does so with hooks on modules.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.jax_internals import ClosedJaxpr, JaxprEqn, Literal, Var, acts
from fddp.jaxpr.equations import form_of, makers, straighten, variables
from fddp.jaxpr.interpreter import Read, Values
from fddp.jaxpr.loops.weight_rows import (
    LayerWeights,
    cheap_sources,
    read_by_rows,
    read_whole,
    rows_needed,
    run_by_rows,
)

# (group, values that must exist before its gather) → its weights by position of the input, and
# these values
Bring: TypeAlias = Callable[[int, Mapping[Var, Any]], tuple[Mapping[int, Any], Mapping[Var, Any]]]


class Reading(NamedTuple):
    """A span of equations that read a group of weights."""

    group: int
    begin: int
    """Position of the first of these equations."""


class InReadings(NamedTuple):
    """A program whose weights are gathered in groups."""

    closed: ClosedJaxpr
    eqns: Sequence[JaxprEqn]
    """The equations of the forward pass, then those of the backward pass."""
    of_weights: Sequence[JaxprEqn]
    """The equations that run after each gather; `eqns` does not contain them."""
    readings: Sequence[Reading]
    """The readings, in order."""
    stacks: Mapping[Var, tuple[int, int]]
    """Stacks that only loops read, layer by layer → position of the input, and its group."""

    @property
    def times(self) -> Counter[int]:
        """Number of gathers of each group; a loop gathers all layers of a group once."""
        groups = {var: group for var, (_, group) in self.stacks.items()}
        times = Counter(reading.group for reading in self.readings)
        for eqn in self.eqns:
            times.update(rows_needed(eqn, groups))
        return times


def in_readings(
    closed: ClosedJaxpr,
    groups: Mapping[int, int],
    forward: Collection[int],
    rounds: Mapping[int, int],
) -> InReadings:
    """Finds the readings of a program's weights, for `run_in_readings`.

    `groups` maps the position of an input, a weight, to its group. `forward` are the positions of
    the outputs of the forward pass. `rounds` maps a group of stacks to its number of layers, if
    loops may read it layer by layer.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1]))
    >>> program = jax.make_jaxpr(jax.value_and_grad(loss))([jnp.eye(2), jnp.eye(2)], jnp.ones(2))
    >>> [reading.group for reading in in_readings(program, {0: 0, 1: 1}, [0], {}).readings]
    [0, 1]
    """
    depths = {position: rounds[group] for position, group in groups.items() if group in rounds}
    program = read_by_rows(closed, depths) if depths else straighten(closed)
    stacks = _stacks(program, groups, depths)
    sources = [frozenset[int]()] * len(program.in_avals)
    for position, group in groups.items():
        if program.jaxpr.invars[position] not in stacks:
            sources[position] = frozenset([group])
    groups_of = cheap_sources(program.jaxpr, sources)

    def is_of_weights(eqn: JaxprEqn) -> bool:
        return any(map(groups_of, eqn.outvars))

    def read(atoms: Iterable[Var | Literal]) -> list[int]:
        return sorted(frozenset[int]().union(*map(groups_of, variables(atoms))))

    first, second = _passes(program, forward)
    of_weights = list(filter(is_of_weights, first + second))
    first = list(filterfalse(is_of_weights, first))
    eqns = first + list(filterfalse(is_of_weights, second))
    reads = [read(eqn.invars) for eqn in eqns]
    readings = _readings([*reads, read(program.jaxpr.outvars)], len(first))
    return InReadings(program, eqns, of_weights, list(readings), stacks)


def run_in_readings(
    program: InReadings,
    args: Sequence[jax.Array | None],
    bring: Bring,
    sources: Mapping[int, LayerWeights],
) -> list[Any]:
    """Runs a program under a trace, and gathers weights shortly before they are read.

    It prefetches a single group: while group k is read, group k + 1 is gathered, behind a barrier
    on the values computed and gathered before. The layers of a loop are gathered after the previous
    loop with gathered layers, so that no layer waits long.

    `args` are the inputs, with None in place of weights; `bring` gathers a group. `sources` maps a
    group of stacks that loops read layer by layer to the source of its layers.
    """
    invars = program.closed.jaxpr.invars
    values = Values(program.closed, args)
    for var, x in zip(invars, args):
        if x is None:
            del values[var]
    newest = list[Var]()  # the value computed last
    gathered = list[dict[Var, Any]]()
    loop_output = list[Var]()  # a value of the last loop with gathered layers

    def gather(reading: Reading) -> None:
        before = {var: values[var] for var in newest}
        last = gathered[-1] if gathered else {}
        # A single array of the last group is enough; a small array, since it may be copied.
        smallest = sorted(last, key=lambda var: last[var].size)[:1]
        weights, after = bring(reading.group, before | {var: last[var] for var in smallest})
        values.update((var, after[var]) for var in newest)
        last.update((var, after[var]) for var in smallest)
        gathered.append({invars[position]: x for position, x in weights.items()})

    def begin(position: int) -> None:
        for k, reading in enumerate(program.readings):
            if reading.begin == position:
                for ahead in program.readings[len(gathered) : k + 2]:
                    gather(ahead)
                values.update(gathered[k])
                _run_again(program, values, set(gathered[k]))

    def run_loop(eqn: JaxprEqn, read: Read) -> list[Any] | None:
        nonlocal sources
        if program.stacks.keys().isdisjoint(variables(eqn.invars)):
            return None
        barred, sources = _behind({var: values[var] for var in loop_output}, sources)
        values.update(barred)
        loop_output[:] = list(filter(_is_numbers, eqn.outvars))[:1]
        return run_by_rows(eqn, read, program.stacks, sources)

    for position, eqn in enumerate(program.eqns):
        begin(position)
        values.run([eqn], run_loop)
        newest[:] = list(filter(_is_numbers, eqn.outvars))[:1] or newest
    begin(len(program.eqns))
    return values.outputs()


def _behind(
    before: Mapping[Var, Any], sources: Mapping[int, LayerWeights]
) -> tuple[dict[Var, Any], dict[int, LayerWeights]]:
    """Puts a barrier between values and the sources of layers; returns both.

    XLA would otherwise gather for all loops at once, and keep the layers.
    """
    arrays = [source.given for source in sources.values()]
    values, arrays = jax.lax.optimization_barrier((list(before.values()), arrays))
    barred = dict[int, LayerWeights]()
    for (group, source), x in zip(sources.items(), arrays):
        barred[group] = source._replace(given=x)
    return dict(zip(before, values)), barred


def _passes(
    program: ClosedJaxpr, forward: Collection[int]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Splits the live equations into the forward pass and all others, in order."""
    eqns = program.jaxpr.eqns
    outputs = program.jaxpr.outvars
    live = makers(eqns, variables(outputs), filter(acts, eqns))
    forward_outputs = list(variables(outputs[position] for position in forward))
    ids = set(map(id, makers(eqns, forward_outputs)))
    end = max((position for position, eqn in enumerate(live) if id(eqn) in ids), default=-1)
    # A print before the loss belongs to the forward pass.
    first = makers(eqns, forward_outputs, filter(acts, live[:end]))
    ids = set(map(id, first))
    return first, [eqn for eqn in live if id(eqn) not in ids]


def _stacks(
    program: ClosedJaxpr, groups: Mapping[int, int], depths: Mapping[int, int]
) -> dict[Var, tuple[int, int]]:
    """The stacks of the groups that only loops read, layer by layer."""
    stacks = {program.jaxpr.invars[position]: (position, groups[position]) for position in depths}
    whole_stacks = read_whole(program, dict(zip(stacks, depths.values())))
    whole_groups = {stacks[var][1] for var in whole_stacks}
    return {var: stack for var, stack in stacks.items() if stack[1] not in whole_groups}


def _readings(reads: Sequence[Sequence[int]], border: int) -> Iterator[Reading]:
    """Yields the readings in order, from the groups read at each position.

    The forward pass ends at position `border`. A group that is read until then stays for the
    backward pass, which would gather it again at once.
    """
    begins = dict[int, int]()
    latest = dict[int, int]()
    for position, groups in enumerate(reads):
        if position == border:
            last = max(begins.values(), default=0)
            begins = {group: begin for group, begin in begins.items() if latest[group] >= last}
        for group in groups:
            latest[group] = position
            if group not in begins:
                begins[group] = position
                yield Reading(group, position)


def _run_again(program: InReadings, values: Values, fresh: set[Var]) -> None:
    """Runs the equations of weights that read fresh values, if all their inputs exist."""
    for eqn in program.of_weights:
        inputs = set(variables(eqn.invars))
        if fresh & inputs and inputs <= values.keys():
            values.run([eqn])
            fresh.update(eqn.outvars)


def _is_numbers(var: Var) -> bool:
    return jnp.issubdtype(form_of(var).dtype, jnp.inexact) and form_of(var).size > 1
