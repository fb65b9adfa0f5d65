"""Runs a loop over layers in parts, so that what its rounds make is ready round by round.

The body is the same, and so is the order of its rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    along_first_dim,
    joins_first_dim,
    loop_parts,
    run_again,
    run_as_it_is,
    scan_body,
    shorter_scan,
)
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.flow import arrival, flow
from fddp.jaxpr.part_kinds import ELEMENTWISE
from fddp.jaxpr.rounds import Bounds, joined_bounds, wanted_slices, with_slices


class InRounds(NamedTuple):
    """A program whose loops run in parts."""

    run: Callable[..., list[Any]]
    """`run(*inputs, *begins)` → its outputs, and the inputs that slices are written into, after each slice but the
    last."""
    begins: tuple[int, ...]
    """The numbers that it is given behind its inputs: where slices begin. They are inputs, so that the rounds of a loop
    are one program."""


def in_rounds(closed: ClosedJaxpr, onto: Mapping[int, int], comes: Mapping[int, int]) -> InRounds | None:
    """Makes slices of arrays one after the other, where a program takes slices or puts them together.

    A scan runs once for each slice, if the rows that it makes are taken in slices, or if those that it is given are put
    together of slices that come late. What elementwise equations make of slices, they make slice by slice. Such an
    output is written into an input, slice by slice.

    Args:
      closed: the program.
      onto: number of an output → number of the input of the same form whose memory it may have.
      comes: number of an input → when it comes; slices are made in the order in which what they need comes.

    Returns:
      The program, to be traced; None if it neither takes slices nor puts any together.
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    when = arrival(jaxpr, comes)
    bounds = wanted_slices(jaxpr, when, [jaxpr.outvars[number] for number in onto])
    begins = sorted({begin for one in bounds.values() for begin, _ in one})
    if not begins:
        return None

    first, then = _reading_last(jaxpr, bounds, [jaxpr.outvars[out] for out in onto])

    def run(*args: Any) -> list[Any]:
        count = len(jaxpr.invars)
        rewriting = _Rewriting(program, bounds, dict(zip(begins, args[count:])))
        rewriting.values.update(zip(jaxpr.invars, args[:count]))
        for eqn in first:
            rewriting.make(eqn)
        between = rewriting.write({jaxpr.outvars[out]: jaxpr.invars[into] for out, into in onto.items()}, when)
        for eqn in then:
            rewriting.make(eqn)
        return [*rewriting.outputs(), *between]

    return InRounds(run, tuple(begins))


def _reading_last(
    jaxpr: Jaxpr, bounds: Mapping[Var, Bounds], written: Sequence[Any]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Puts behind what is written those equations that only read slices of it: they leave its memory to the writing."""

    def reads(eqn: JaxprEqn, given: list[bool]) -> list[bool]:
        source = eqn.invars[0] if eqn.invars else None
        slices = bounds.get(source, ()) if isinstance(source, Var) else ()
        return [any(given) or along_first_dim(eqn) in slices] * len(eqn.outvars)

    late = flow(jaxpr, [False] * len(jaxpr.invars), reads, lambda atom: False)
    if any(map(late, written)):
        return list(jaxpr.eqns), []
    then = [bool(eqn.outvars) and late(eqn.outvars[0]) for eqn in jaxpr.eqns]
    return [eqn for eqn, last in zip(jaxpr.eqns, then) if not last], list(compress(jaxpr.eqns, then))


class _Sliced(NamedTuple):
    """An array that is made slice by slice."""

    bounds: Bounds
    piece: Callable[[int], Any]
    """number of a slice → the slice."""

    def whole(self) -> Any:
        return jnp.concatenate([self.piece(k) for k in range(len(self.bounds))])


class _Rewriting:
    """A program that is being run under a trace, some of its values slice by slice."""

    def __init__(self, program: ClosedJaxpr, bounds: Mapping[Var, Bounds], starts: Mapping[int, Any]) -> None:
        self._program = program
        self._bounds = bounds
        self._starts = starts
        self._written: dict[Any, Any] = {}  # inputs, with the slices that are written into them
        self._done: dict[Any, Any] = {}  # outputs, once all their slices are written
        self.values: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts))

    def make(self, eqn: JaxprEqn) -> None:
        """Makes what an equation makes."""
        name = eqn.primitive.name
        first = eqn.invars[0] if eqn.invars else None
        there = self.values.get(first) if isinstance(first, Var) else None
        part = along_first_dim(eqn)
        bounds = self._rounds(eqn) if name == "scan" else next(map(self._bounds.get, eqn.outvars), None)
        if isinstance(there, _Sliced) and part in there.bounds:
            self.values[eqn.outvars[0]] = there.piece(there.bounds.index(part))
        elif part and part[0] in self._starts:
            self.values[eqn.outvars[0]] = self._cut(self._whole(first), *part)
        elif bounds and joins_first_dim(eqn) and bounds == joined_bounds(eqn):
            pieces = [self._whole(atom) for atom in eqn.invars]
            self.values[eqn.outvars[0]] = _Sliced(bounds, pieces.__getitem__)
        elif name == "scan" and bounds:
            self._loop(eqn, bounds)
        elif name in ELEMENTWISE and bounds and with_slices(eqn):
            self.values[eqn.outvars[0]] = _Sliced(bounds, cache(lambda k: self._elementwise(eqn, bounds, k)))
        else:
            made = run_as_it_is(self._program, eqn, [self._whole(atom) for atom in eqn.invars])
            self.values.update(zip(eqn.outvars, made))

    def outputs(self) -> list[Any]:
        """Gives the outputs."""
        return list(map(self._whole, self._program.jaxpr.outvars))

    def write(self, onto: Mapping[Var, Var], when: Callable[[Any], int]) -> list[Any]:
        """Writes outputs into inputs, slice by slice; gives what becomes of these inputs between two slices."""
        made: dict[Bounds, list[tuple[Var, Var]]] = {}
        for out, into in onto.items():
            if isinstance(value := self.values.get(out), _Sliced):
                made.setdefault(value.bounds, []).append((out, into))
        between: list[Any] = []
        for bounds, pairs in made.items():
            self._written = {into: self.values[into] for _, into in pairs}
            order = self._in_time(bounds, when)
            for k in order:
                # All slices k are read before any of them is written over.
                pieces = [(into, self.values[out].piece(k)) for out, into in pairs]
                for into, piece in pieces:
                    start = self._starts[bounds[k][0]]
                    self._written[into] = jax.lax.dynamic_update_slice_in_dim(self._written[into], piece, start, 0)
                between += self._written.values() if k != order[-1] else ()
            self._done |= {out: self._written[into] for out, into in pairs}
            self._written = {}
        return between

    def _in_time(self, bounds: Bounds, when: Callable[[Any], int]) -> list[int]:
        """Orders the numbers of slices by when they come."""
        comes = dict.fromkeys(range(len(bounds)), 0)
        for eqn in self._program.jaxpr.eqns:
            if joins_first_dim(eqn) and self._bounds.get(eqn.outvars[0]) == bounds == joined_bounds(eqn):
                comes = {k: max(comes[k], when(atom)) for k, atom in enumerate(eqn.invars)}
        return sorted(comes, key=comes.__getitem__)

    def _rounds(self, loop: JaxprEqn) -> Bounds | None:
        """The slices that a loop is to make, or that it is given."""
        _, carry, rows = loop_parts(loop, loop.invars)
        wanted = [self._bounds[var] for var in loop.outvars[len(carry) :] if var in self._bounds]
        there = (self.values.get(atom) for atom in rows if isinstance(atom, Var))
        return next(iter([*wanted, *(value.bounds for value in there if isinstance(value, _Sliced))]), None)

    def _loop(self, eqn: JaxprEqn, bounds: Bounds) -> None:
        consts, carry, rows = loop_parts(eqn, eqn.invars)
        fixed = [self._whole(atom) for atom in consts]
        state = [self._whole(atom) for atom in carry]
        made: list[list[Any]] = [[]] * len(bounds)
        order = range(len(bounds))
        for k in reversed(order) if scan_body(eqn)[1]["reverse"] else order:
            begin, end = bounds[k]
            out = shorter_scan(eqn, end - begin, [*fixed, *state, *(self._slice(atom, bounds, k) for atom in rows)])
            state = out[: len(carry)]
            made[k] = out[len(carry) :]
        self.values.update(zip(eqn.outvars, state))
        for number, var in enumerate(eqn.outvars[len(carry) :]):
            self.values[var] = _Sliced(bounds, [one[number] for one in made].__getitem__)

    def _elementwise(self, eqn: JaxprEqn, bounds: Bounds, k: int) -> Any:
        in_slices = with_slices(eqn)
        given = [self._slice(x, bounds, k) if x in in_slices else self._whole(x) for x in eqn.invars]
        return run_again(eqn, given)

    def _slice(self, atom: Any, bounds: Bounds, k: int) -> Any:
        there = self.values.get(atom) if isinstance(atom, Var) else None
        if isinstance(there, _Sliced) and there.bounds == bounds:
            return there.piece(k)
        begin, end = bounds[k]
        # What is written into an input leaves the slices that are still to be read as they were.
        array = self._written[atom] if isinstance(atom, Var) and atom in self._written else self._whole(atom)
        return self._cut(array, begin, end)

    def _cut(self, array: Any, begin: int, end: int) -> Any:
        start = self._starts[begin]
        if isinstance(start, int):
            return jax.lax.slice_in_dim(array, begin, end)
        return jax.lax.dynamic_slice_in_dim(array, start, end - begin)

    def _whole(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        value = self._done.get(atom, self.values[atom])
        return value.whole() if isinstance(value, _Sliced) else value
