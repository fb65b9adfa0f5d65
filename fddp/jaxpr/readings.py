"""Gives a program its weights in groups, each shortly before it is read, and once more for the backward pass.

A group of weights is read in the forward pass, and again in the backward pass, from the other end. In between nobody
needs it. What is cheap and made of weights alone, a copy in 16 bits say, is made anew with them: it would else outlive
them. Of a stack of layers that only loops read, each round of a loop is given its own layer.

Source: PyTorch's FSDP2, whose `reshard_after_forward` does so with hooks on modules.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.jax_internals import ClosedJaxpr, JaxprEqn, Literal, Var, acts, run_as_it_is
from fddp.jaxpr.equations import cheap, makers, straighten, value_of, variables
from fddp.jaxpr.flow import flow
from fddp.jaxpr.weight_rows import Rows, read_by_rows, read_whole, rows_needed, run_by_rows

# (group, values that must be there before it comes) → its weights, by the numbers of inputs; and these values
Bring: TypeAlias = Callable[[int, Mapping[Var, Any]], tuple[Mapping[int, Any], Mapping[Var, Any]]]


class Reading(NamedTuple):
    """A span of equations that read a group of weights."""

    group: int
    begin: int
    """The place of the first of these equations."""


class InReadings(NamedTuple):
    """A program whose weights come in groups."""

    closed: ClosedJaxpr
    eqns: Sequence[JaxprEqn]
    """The equations of the forward pass, and all others behind them."""
    of_weights: Sequence[JaxprEqn]
    """Equations that are done anew whenever weights come; they are not among the others."""
    readings: Sequence[Reading]
    """The readings, in order."""
    stacks: Mapping[Var, tuple[int, int]]
    """The weights of which loops read rows, and nobody anything else → number of the input, and its group."""

    @property
    def times(self) -> Counter[int]:
        """Counts how often each group comes; a loop brings all rows of a group once."""
        groups = {var: group for var, (_, group) in self.stacks.items()}
        in_loops = (group for eqn in self.eqns for group in rows_needed(eqn, groups))
        return Counter([*(reading.group for reading in self.readings), *in_loops])


def in_readings(
    closed: ClosedJaxpr, groups: Mapping[int, int], forward: Collection[int], rounds: Mapping[int, int]
) -> InReadings:
    """Finds where a program reads its weights.

    Args:
      closed: the program.
      groups: number of an input that is a weight → its group.
      forward: numbers of the outputs that the forward pass makes.
      rounds: a group of stacks that loops may read row by row → the number of rows.

    Returns:
      The program, for `run_in_readings`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1]))
      >>> program = jax.make_jaxpr(jax.value_and_grad(loss))([jnp.eye(2), jnp.eye(2)], jnp.ones(2))
      >>> [reading.group for reading in in_readings(program, {0: 0, 1: 1}, [0], {}).readings]
      [0, 1]
    """
    in_rows = {number: rounds[group] for number, group in groups.items() if group in rounds}
    program = read_by_rows(closed, in_rows) if in_rows else straighten(closed)
    stacks = _stacks(program, groups, in_rows)
    of = _groups_of(program, {n: group for n, group in groups.items() if program.jaxpr.invars[n] not in stacks})
    passes = _passes(program, forward)
    again = [eqn for eqns in passes for eqn in eqns if any(map(of, eqn.outvars))]
    ids = set(map(id, again))
    first, rest = ([eqn for eqn in eqns if id(eqn) not in ids] for eqns in passes)
    read = [eqn.invars for eqn in (*first, *rest)]
    readings = _found([_read(of, atoms) for atoms in (*read, program.jaxpr.outvars)], len(first))
    return InReadings(program, [*first, *rest], again, list(readings), stacks)


def run_in_readings(program: InReadings, args: Sequence[Any], bring: Bring, rows: Mapping[int, Rows]) -> list[Any]:
    """Runs a program under a trace, with weights that come shortly before they are read.

    While one group is read the next one comes, and no other: it comes after all that was made, and came, before that.
    A loop's rows come after the loop before it that is given rows, so that no row of it waits long.

    Args:
      program: from `in_readings`.
      args: the inputs, None in place of weights.
      bring: brings a group.
      rows: a group of stacks → what its rows are made of, where loops read them row by row.

    Returns:
      The outputs.
    """
    jaxpr = program.closed.jaxpr
    given = {var: x for var, x in zip(jaxpr.invars, args) if x is not None}
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, program.closed.consts)) | given
    made = list[Var]()  # the value that was made last
    came = list[dict[Var, Any]]()
    looped = list[Var]()  # what the last loop made that was given rows

    def come(count: int) -> None:
        for reading in program.readings[len(came) : count]:
            before = {var: values[var] for var in made}
            # Of the group that came last one array will do, a small one: it may be copied.
            late = [min(weights, key=lambda var: weights[var].size) for weights in came[-1:]]
            weights, after = bring(reading.group, before | {var: came[-1][var] for var in late})
            values.update((var, after[var]) for var in made)
            came[-1:] = [weights | {var: after[var] for var in late} for weights in came[-1:]]
            came.append({jaxpr.invars[number]: x for number, x in weights.items()})

    begins = dict[int, list[int]]()
    for k, reading in enumerate(program.readings):
        begins.setdefault(reading.begin, []).append(k)
    for place, eqn in enumerate([*program.eqns, None]):
        for k in begins.get(place, []):
            come(k + 2)
            values.update(came[k])
            _make_anew(program, values, set(came[k]))
        if eqn is not None:
            if program.stacks.keys().isdisjoint(variables(eqn.invars)):
                _run(program, eqn, values)
            else:
                behind, rows = _behind({var: values[var] for var in looped}, rows)
                values.update(behind)
                values.update(zip(eqn.outvars, run_by_rows(eqn, partial(value_of, values), program.stacks, rows)))
                looped = [*filter(_is_numbers, eqn.outvars)][:1]
            made = [*filter(_is_numbers, eqn.outvars)][:1] or made
    return [value_of(values, atom) for atom in jaxpr.outvars]


def _behind(before: Mapping[Var, Any], rows: Mapping[int, Rows]) -> tuple[dict[Var, Any], dict[int, Rows]]:
    """Lets rows wait for some values; gives both. XLA would else bring them for all loops at once, and keep them."""
    values, given = jax.lax.optimization_barrier((list(before.values()), [one.given for one in rows.values()]))
    each = zip(rows.items(), given)
    return dict(zip(before, values)), {group: one._replace(given=x) for (group, one), x in each}


def _passes(program: ClosedJaxpr, forward: Collection[int]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations of the forward pass, and the other ones that somebody needs, in order."""
    eqns = program.jaxpr.eqns
    outputs = program.jaxpr.outvars
    needed = makers(eqns, variables(outputs), filter(acts, eqns))
    wanted = list(variables(outputs[number] for number in forward))
    ids = set(map(id, makers(eqns, wanted)))
    end = max((place for place, eqn in enumerate(needed) if id(eqn) in ids), default=-1)
    # What is printed before the loss is there belongs to the forward pass.
    ids = set(map(id, makers(eqns, wanted, filter(acts, needed[:end]))))
    return [eqn for eqn in needed if id(eqn) in ids], [eqn for eqn in needed if id(eqn) not in ids]


def _stacks(program: ClosedJaxpr, groups: Mapping[int, int], rows: Mapping[int, int]) -> dict[Var, tuple[int, int]]:
    """The weights of the groups of which nothing is read but rows, by loops."""
    lengths = {program.jaxpr.invars[number]: length for number, length in rows.items()}
    whole = read_whole(program, lengths)
    of = {program.jaxpr.invars[number]: (number, groups[number]) for number in rows}
    kept = {of[var][1] for var in whole}
    return {var: (number, group) for var, (number, group) in of.items() if group not in kept}


def _groups_of(program: ClosedJaxpr, groups: Mapping[int, int]) -> Callable[[Any], frozenset[int]]:
    """Finds the groups that a value is made of, where it is cheap and made of weights alone; else it has none."""
    jaxpr = program.jaxpr
    nothing = frozenset[int]()

    def made(eqn: JaxprEqn, given: list[frozenset[int]]) -> list[frozenset[int]]:
        alone = all(of or isinstance(atom, Literal) for of, atom in zip(given, eqn.invars))
        of = nothing.union(*given) if alone and cheap(eqn) and not acts(eqn) else nothing
        return [of] * len(eqn.outvars)

    inputs = [frozenset({groups[n]}) if n in groups else nothing for n in range(len(jaxpr.invars))]
    return flow(jaxpr, inputs, made, lambda atom: nothing)


def _read(of: Callable[[Any], frozenset[int]], atoms: Iterable[Any]) -> list[int]:
    return sorted(frozenset[int]().union(*map(of, variables(atoms))))


def _found(reads: Sequence[Sequence[int]], border: int) -> Iterator[Reading]:
    """The readings, in order.

    A group that is read until the forward pass ends stays for the backward pass: it would come again at once.

    Args:
      reads: the groups that each place reads.
      border: the place at which the forward pass has ended.
    """
    begun = dict[int, int]()
    latest = dict[int, int]()
    for place, groups in enumerate(reads):
        if place == border:
            last = max(begun.values(), default=0)
            begun = {group: begin for group, begin in begun.items() if latest[group] >= last}
        for group in groups:
            latest[group] = place
            if group not in begun:
                begun[group] = place
                yield Reading(group, place)


def _make_anew(program: InReadings, values: dict[Var, Any], fresh: set[Var]) -> None:
    """Does the equations of weights again that read fresh values, where all that they read is there."""
    for eqn in program.of_weights:
        given = set(variables(eqn.invars))
        if fresh & given and given <= values.keys():
            _run(program, eqn, values)
            fresh.update(eqn.outvars)


def _run(program: InReadings, eqn: JaxprEqn, values: dict[Var, Any]) -> None:
    made = run_as_it_is(program.closed, eqn, [value_of(values, atom) for atom in eqn.invars])
    values.update(zip(eqn.outvars, made))


def _is_numbers(var: Var) -> bool:
    form: Any = var.aval
    return jnp.issubdtype(form.dtype, jnp.inexact) and form.size > 1
