"""Splits loops over layers into shorter loops, so that their outputs are ready slice by slice.

The body of a loop and the order of its rounds stay the same.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

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
    """A program whose loops are split."""

    run: Callable[..., list[Any]]
    """`run(*inputs, *begins)` → its outputs, then the overwritten inputs after each slice but the
    last."""
    begins: tuple[int, ...]
    """Its trailing inputs: the offsets of slices. As inputs, they let the slices of a loop share a
    program."""


def in_rounds(
    closed: ClosedJaxpr, onto: Mapping[int, int], arrivals: Mapping[int, int]
) -> InRounds | None:
    """Splits a scan into shorter scans if its outputs are read, or its inputs arrive, in slices.

    Elementwise equations on slices run slice by slice, and the slices of an output are written into
    an input. `onto` maps the position of an output to the input whose memory it may take, of the
    same shape and dtype. `arrivals` maps the position of an input to its time of arrival, which
    orders the slices. The program is to be traced; without slices the result is None.
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    when = arrival(jaxpr, arrivals)
    bounds = wanted_slices(jaxpr, when, [jaxpr.outvars[position] for position in onto])
    begins = sorted({begin for slices in bounds.values() for begin, _ in slices})
    if not begins:
        return None

    main, final = _reading_last(jaxpr, bounds, [jaxpr.outvars[out] for out in onto])

    def run(*args: Any) -> list[Any]:
        count = len(jaxpr.invars)
        rewriting = _Rewriting(program, bounds, dict(zip(begins, args[count:])))
        rewriting.values.update(zip(jaxpr.invars, args[:count]))
        for eqn in main:
            rewriting.make(eqn)
        between = rewriting.write(
            {jaxpr.outvars[out]: jaxpr.invars[into] for out, into in onto.items()}, when
        )
        for eqn in final:
            rewriting.make(eqn)
        return [*rewriting.outputs(), *between]

    return InRounds(run, tuple(begins))


def _reading_last(
    jaxpr: Jaxpr, bounds: Mapping[Var, Bounds], written: Sequence[Var | Literal]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Moves equations that only read slices of the written outputs after the writes.

    Otherwise the reads would keep the memory from being overwritten.
    """

    def through(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
        source = eqn.invars[0] if eqn.invars else None
        slices = bounds.get(source, ()) if isinstance(source, Var) else ()
        return [any(inputs) or along_first_dim(eqn) in slices] * len(eqn.outvars)

    reads_slice = flow(jaxpr, [False] * len(jaxpr.invars), through, lambda atom: False)
    if any(map(reads_slice, written)):
        return list(jaxpr.eqns), []
    final = [bool(eqn.outvars) and reads_slice(eqn.outvars[0]) for eqn in jaxpr.eqns]
    return [eqn for eqn, last in zip(jaxpr.eqns, final) if not last], list(
        compress(jaxpr.eqns, final)
    )


class _Sliced(NamedTuple):
    """An array computed slice by slice."""

    bounds: Bounds
    piece: Callable[[int], Any]
    """Number of a slice → the slice."""

    def whole(self) -> Any:
        return jnp.concatenate([self.piece(k) for k in range(len(self.bounds))])


class _Rewriting:
    """Runs a program under a trace, some of its values slice by slice."""

    def __init__(
        self, program: ClosedJaxpr, bounds: Mapping[Var, Bounds], starts: Mapping[int, Array | int]
    ) -> None:
        self._program = program
        self._bounds = bounds
        self._starts = starts
        self._written: dict[Any, Any] = {}  # inputs, partly overwritten
        self._done: dict[Any, Any] = {}  # outputs with all their slices
        self.values: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts))

    def make(self, eqn: JaxprEqn) -> None:
        """Runs an equation, slice by slice if its values are sliced."""
        name = eqn.primitive.name
        operand = eqn.invars[0] if eqn.invars else None
        source = self.values.get(operand) if isinstance(operand, Var) else None
        span = along_first_dim(eqn)
        bounds = (
            self._rounds(eqn) if name == "scan" else next(map(self._bounds.get, eqn.outvars), None)
        )
        if isinstance(source, _Sliced) and span in source.bounds:
            self.values[eqn.outvars[0]] = source.piece(source.bounds.index(span))
        elif span and span[0] in self._starts:
            self.values[eqn.outvars[0]] = self._cut(self._whole(operand), *span)
        elif bounds and joins_first_dim(eqn) and bounds == joined_bounds(eqn):
            pieces = [self._whole(atom) for atom in eqn.invars]
            self.values[eqn.outvars[0]] = _Sliced(bounds, pieces.__getitem__)
        elif name == "scan" and bounds:
            self._loop(eqn, bounds)
        elif name in ELEMENTWISE and bounds and with_slices(eqn):
            self.values[eqn.outvars[0]] = _Sliced(
                bounds, cache(lambda k: self._elementwise(eqn, bounds, k))
            )
        else:
            outputs = run_as_it_is(self._program, eqn, [self._whole(atom) for atom in eqn.invars])
            self.values.update(zip(eqn.outvars, outputs))

    def outputs(self) -> list[Any]:
        """Returns the outputs, whole."""
        return list(map(self._whole, self._program.jaxpr.outvars))

    def write(self, onto: Mapping[Var, Var], when: Callable[[Var | Literal], int]) -> list[Any]:
        """Writes outputs into inputs, slice by slice; returns these inputs between two slices."""
        pairs_by_bounds: dict[Bounds, list[tuple[Var, Var]]] = {}
        for out, into in onto.items():
            if isinstance(value := self.values.get(out), _Sliced):
                pairs_by_bounds.setdefault(value.bounds, []).append((out, into))
        between: list[Any] = []
        for bounds, pairs in pairs_by_bounds.items():
            self._written = {into: self.values[into] for _, into in pairs}
            order = self._in_time(bounds, when)
            for k in order:
                # Slice k of all outputs is read before slice k of any input is overwritten.
                pieces = [(into, self.values[out].piece(k)) for out, into in pairs]
                for into, piece in pieces:
                    start = self._starts[bounds[k][0]]
                    self._written[into] = jax.lax.dynamic_update_slice_in_dim(
                        self._written[into], piece, start, 0
                    )
                between += self._written.values() if k != order[-1] else ()
            self._done |= {out: self._written[into] for out, into in pairs}
            self._written = {}
        return between

    def _in_time(self, bounds: Bounds, when: Callable[[Var | Literal], int]) -> list[int]:
        """Orders the numbers of the slices by arrival."""
        times = dict.fromkeys(range(len(bounds)), 0)
        for eqn in self._program.jaxpr.eqns:
            if joins_first_dim(eqn) and self._bounds.get(eqn.outvars[0]) == bounds == joined_bounds(
                eqn
            ):
                times = {k: max(times[k], when(atom)) for k, atom in enumerate(eqn.invars)}
        return sorted(times, key=times.__getitem__)

    def _rounds(self, loop: JaxprEqn) -> Bounds | None:
        """The slices of a loop's outputs or of its inputs; None if neither are sliced."""
        _, carry, layered = loop_parts(loop, loop.invars)
        slices = [self._bounds[var] for var in loop.outvars[len(carry) :] if var in self._bounds]
        inputs = (self.values.get(atom) for atom in layered if isinstance(atom, Var))
        return next(
            iter([*slices, *(value.bounds for value in inputs if isinstance(value, _Sliced))]), None
        )

    def _loop(self, eqn: JaxprEqn, bounds: Bounds) -> None:
        consts, carry, layered = loop_parts(eqn, eqn.invars)
        const_values = [self._whole(atom) for atom in consts]
        state = [self._whole(atom) for atom in carry]
        pieces: list[list[Any]] = [[]] * len(bounds)
        order = range(len(bounds))
        for k in reversed(order) if scan_body(eqn)[1]["reverse"] else order:
            begin, end = bounds[k]
            outputs = shorter_scan(
                eqn,
                end - begin,
                [*const_values, *state, *(self._slice(atom, bounds, k) for atom in layered)],
            )
            state = outputs[: len(carry)]
            pieces[k] = outputs[len(carry) :]
        self.values.update(zip(eqn.outvars, state))
        for number, var in enumerate(eqn.outvars[len(carry) :]):
            self.values[var] = _Sliced(bounds, [arrays[number] for arrays in pieces].__getitem__)

    def _elementwise(self, eqn: JaxprEqn, bounds: Bounds, k: int) -> Any:
        in_slices = with_slices(eqn)
        operands = [
            self._slice(x, bounds, k) if x in in_slices else self._whole(x) for x in eqn.invars
        ]
        return run_again(eqn, operands)

    def _slice(self, atom: Var | Literal, bounds: Bounds, k: int) -> Any:
        value = self.values.get(atom) if isinstance(atom, Var) else None
        if isinstance(value, _Sliced) and value.bounds == bounds:
            return value.piece(k)
        begin, end = bounds[k]
        # In an input that is partly overwritten, the slices that are still to be read are intact.
        array = (
            self._written[atom]
            if isinstance(atom, Var) and atom in self._written
            else self._whole(atom)
        )
        return self._cut(array, begin, end)

    def _cut(self, array: Array, begin: int, end: int) -> Any:
        start = self._starts[begin]
        if isinstance(start, int):
            return jax.lax.slice_in_dim(array, begin, end)
        return jax.lax.dynamic_slice_in_dim(array, start, end - begin)

    def _whole(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        value = self._done.get(atom, self.values[atom])
        return value.whole() if isinstance(value, _Sliced) else value
