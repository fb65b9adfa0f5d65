"""Splits loops over layers into shorter loops, so that their outputs are ready slice by slice.

The body of a loop and the order of its rounds stay the same.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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
    scan_body,
    shorter_scan,
)
from fddp.jaxpr.equations import ELEMENTWISE, straighten, variables
from fddp.jaxpr.flow import arrival, flow
from fddp.jaxpr.interpreter import Read, Values
from fddp.jaxpr.loops.rounds import Bounds, joined_bounds, wanted_slices, with_slices


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
    written = list(map(jaxpr.outvars.__getitem__, onto))
    bounds = wanted_slices(jaxpr, when, written)
    begins = sorted({begin for slices in bounds.values() for begin, _ in slices})
    if not begins:
        return None

    main, final = _reading_last(jaxpr, bounds, written)
    targets = dict(zip(written, map(jaxpr.invars.__getitem__, onto.values())))

    def run(*args: Any) -> list[Any]:
        values = _SlicedValues(program, args, bounds, dict(zip(begins, args[len(jaxpr.invars) :])))
        values.run(main, values.make)
        between = values.write(targets, when)
        values.run(final, values.make)
        return [*values.read_all(jaxpr.outvars), *between]

    return InRounds(run, tuple(begins))


def _reading_last(
    jaxpr: Jaxpr, bounds: Mapping[Var, Bounds], written: Sequence[Var | Literal]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Moves equations that only read slices of the written outputs after the writes.

    Otherwise the reads would keep the memory from being overwritten.
    """

    main = list[JaxprEqn]()
    final = list[JaxprEqn]()

    def through(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
        span = along_first_dim(eqn)
        reads = any(inputs) or any(span in bounds.get(v, ()) for v in variables(eqn.invars))
        (final if reads else main).append(eqn)
        return [reads] * len(eqn.outvars)

    reads_slice = flow(jaxpr, [False] * len(jaxpr.invars), through, lambda atom: False)
    if any(map(reads_slice, written)):
        return list(jaxpr.eqns), []
    return main, final


class _Sliced(NamedTuple):
    """An array computed slice by slice."""

    bounds: Bounds
    piece: Callable[[int], Any]
    """Number of a slice → the slice."""

    def whole(self) -> Any:
        return jnp.concatenate(list(map(self.piece, range(len(self.bounds)))))


class _SlicedValues(Values):
    """The values of a program under a trace, some of them slice by slice."""

    def __init__(
        self,
        program: ClosedJaxpr,
        args: Sequence[Any],
        bounds: Mapping[Var, Bounds],
        starts: Mapping[int, Array | int],
    ) -> None:
        super().__init__(program, args)
        self._eqns = program.jaxpr.eqns
        self._bounds = bounds
        self._starts = starts
        self._written: dict[Any, Any] = {}  # inputs, partly overwritten
        self._done: dict[Any, Any] = {}  # outputs with all their slices

    def read(self, atom: Var | Literal) -> Any:
        """Returns a whole value."""
        if isinstance(atom, Var) and atom in self._done:
            return self._done[atom]
        sliced = self._sliced(atom)
        return sliced.whole() if sliced else super().read(atom)

    def make(self, eqn: JaxprEqn, read: Read) -> list[Any] | None:
        """Runs an equation slice by slice if its values are sliced; else returns None."""
        span = along_first_dim(eqn)
        if span:
            source = self._sliced(eqn.invars[0])
            if source and span in source.bounds:
                return [source.piece(source.bounds.index(span))]
            if span[0] in self._starts:
                return [self._cut(read(eqn.invars[0]), *span)]
        if eqn.primitive.name == "scan":
            bounds = self._rounds(eqn)
            return self._loop(eqn, bounds) if bounds else None
        bounds = next(map(self._bounds.get, eqn.outvars), None)
        if bounds and joins_first_dim(eqn) and bounds == joined_bounds(eqn):
            return [_Sliced(bounds, list(map(read, eqn.invars)).__getitem__)]
        if bounds and eqn.primitive.name in ELEMENTWISE and with_slices(eqn):
            return [_Sliced(bounds, cache(partial(self._elementwise, eqn, bounds)))]
        return None

    def write(self, onto: Mapping[Var, Var], when: Callable[[Var | Literal], int]) -> list[Any]:
        """Writes outputs into inputs, slice by slice; returns these inputs between two slices."""
        pairs_by_bounds: dict[Bounds, list[tuple[Var, Var]]] = {}
        for out, into in onto.items():
            if sliced := self._sliced(out):
                pairs_by_bounds.setdefault(sliced.bounds, []).append((out, into))
        between: list[Any] = []
        for bounds, pairs in pairs_by_bounds.items():
            self._written = {into: self[into] for _, into in pairs}
            order = self._in_time(bounds, when)
            for k in order:
                # Slice k of all outputs is read before slice k of any input is overwritten.
                pieces = [self[out].piece(k) for out, _ in pairs]
                for (_, into), piece in zip(pairs, pieces):
                    start = self._starts[bounds[k][0]]
                    self._written[into] = jax.lax.dynamic_update_slice_in_dim(
                        self._written[into], piece, start, 0
                    )
                if k != order[-1]:
                    between += self._written.values()
            for out, into in pairs:
                self._done[out] = self._written[into]
            self._written = {}
        return between

    def _in_time(self, bounds: Bounds, when: Callable[[Var | Literal], int]) -> list[int]:
        """Orders the numbers of the slices by arrival."""
        times = [0] * len(bounds)
        for eqn in self._eqns:
            if joins_first_dim(eqn) and self._bounds.get(eqn.outvars[0]) == bounds == joined_bounds(
                eqn
            ):
                times = list(map(max, times, map(when, eqn.invars)))
        return sorted(range(len(bounds)), key=times.__getitem__)

    def _rounds(self, loop: JaxprEqn) -> Bounds | None:
        """The slices of a loop's outputs or of its inputs; None if neither are sliced."""
        _, carry, layered = loop_parts(loop, loop.invars)
        for var in loop.outvars[len(carry) :]:
            if var in self._bounds:
                return self._bounds[var]
        sliced = next(filter(None, map(self._sliced, layered)), None)
        return sliced and sliced.bounds

    def _loop(self, eqn: JaxprEqn, bounds: Bounds) -> list[Any]:
        consts, carry, layered = loop_parts(eqn, eqn.invars)
        const_values = self.read_all(consts)
        state = self.read_all(carry)
        pieces: list[list[Any]] = [[]] * len(bounds)
        order = range(len(bounds))
        for k in reversed(order) if scan_body(eqn)[1]["reverse"] else order:
            begin, end = bounds[k]
            layers = [self._slice(atom, bounds, k) for atom in layered]
            outputs = shorter_scan(eqn, end - begin, [*const_values, *state, *layers])
            state = outputs[: len(carry)]
            pieces[k] = outputs[len(carry) :]
        return [*state, *(_Sliced(bounds, arrays.__getitem__) for arrays in zip(*pieces))]

    def _elementwise(self, eqn: JaxprEqn, bounds: Bounds, k: int) -> Any:
        in_slices = with_slices(eqn)
        operands = [
            self._slice(x, bounds, k) if x in in_slices else self.read(x) for x in eqn.invars
        ]
        return run_again(eqn, operands)[0]

    def _slice(self, atom: Var | Literal, bounds: Bounds, k: int) -> Any:
        sliced = self._sliced(atom)
        if sliced and sliced.bounds == bounds:
            return sliced.piece(k)
        # In an input that is partly overwritten, the slices that are still to be read are intact.
        partly = isinstance(atom, Var) and atom in self._written
        return self._cut(self._written[atom] if partly else self.read(atom), *bounds[k])

    def _cut(self, array: Array, begin: int, end: int) -> Any:
        start = self._starts[begin]
        if isinstance(start, int):
            return jax.lax.slice_in_dim(array, begin, end)
        return jax.lax.dynamic_slice_in_dim(array, start, end - begin)

    def _sliced(self, atom: Var | Literal) -> _Sliced | None:
        """The slices of a value that is computed slice by slice, or None."""
        value = isinstance(atom, Var) and self.get(atom)
        return value if isinstance(value, _Sliced) else None
