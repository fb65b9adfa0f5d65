"""Fuses a loop into an earlier loop that computes its layers, round by round.

`lax.scan` over stacked layers computes the gradients of all layers, a layer in each round. A later
loop sums these layers over replicas. Fused, the sum of a layer overlaps with the computation of the
next layer. Each equation has the same inputs as before, so that no number changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
from jaxtyping import Array

from fddp.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    jaxpr_as_fun,
    loop_parts,
    named_as,
    run_again,
    run_as_it_is,
    scan_body,
)
from fddp.jaxpr.equations import collectives, makers, straighten, variables
from fddp.jaxpr.part_kinds import RESHAPES
from fddp.jaxpr.rounds import form_of
from fddp.jaxpr.row_origins import Origin, origin_of, row_dims, rows_read


def fused_loops(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose loops with collectives run inside the loops before them.

    A loop is fused if it has no carry, and if its layers are computed from the layers of a single
    other loop and from values that do not depend on that loop. The function, of trees of arrays, is
    to be traced.

    >>> def layers_and_sums(x):
    ...     _, layers = jax.lax.scan(lambda a, b: (a + b, a * b), 0.0, x)
    ...     return jax.lax.map(lambda layer: jax.lax.psum(layer, "replica"), 2 * layers)
    >>> count = lambda f, x: str(jax.make_jaxpr(f, axis_env=[("replica", 2)])(x)).count("scan[")
    >>> x = jax.numpy.ones(3)
    >>> count(layers_and_sums, x), count(fused_loops(layers_and_sums), x)
    (2, 1)
    """

    def fused(*args: Any) -> Any:
        closed, forms = jax.make_jaxpr(f, return_shape=True)(*args)
        outputs = _Fusing(straighten(closed), jax.tree.leaves(args)).run()
        return jax.tree.unflatten(jax.tree.structure(forms), outputs)

    return fused


class _Fusing:
    """Runs a program under a trace, some of its loops inside of others."""

    def __init__(self, program: ClosedJaxpr, args: Sequence[Array]) -> None:
        self._program = program
        self._eqns = program.jaxpr.eqns
        self._values: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts))
        self._values.update(zip(program.jaxpr.invars, args))
        self._fused = dict(self._fusions())
        self._kept = self._read()

    def run(self) -> list[Any]:
        """Runs the program; returns its outputs."""
        self._make(range(len(self._eqns)))
        return [self._value(atom) for atom in self._program.jaxpr.outvars]

    def _fusions(self) -> Iterator[tuple[int, Origin]]:
        """Yields the positions of the loops to fuse, and the origins of their layers."""
        fused = set[int]()
        for position, eqn in enumerate(self._eqns):
            if eqn.primitive.name != "scan":
                continue
            body, options = scan_body(eqn)
            consts, carry, layered = loop_parts(eqn, eqn.invars)
            origin = (
                None
                if carry or not collectives(body)
                else origin_of(self._program.jaxpr, layered, consts, position)
            )
            alike = origin and scan_body(self._eqns[origin.loop])[1]["length"] == options["length"]
            if origin and alike and origin.loop not in fused:
                fused.add(position)
                yield position, origin

    def _read(self) -> set[Var]:
        """The values with a reader outside of the loop that computes them."""
        read = set(variables(self._program.jaxpr.outvars))
        hosts = {origin.loop: origin.needs for origin in self._fused.values()}
        for position, eqn in reversed(list(enumerate(self._eqns))):
            if position in self._fused:
                read |= self._fused[position].needs
            elif acts(eqn) or position in hosts or not read.isdisjoint(eqn.outvars):
                read.update(variables(eqn.invars))
        return read

    def _make(self, positions: Iterable[int]) -> None:
        """Runs the live equations at some positions, in order, unless they have run."""
        for position in positions:
            eqn = self._eqns[position]
            inside = [at for at, origin in self._fused.items() if origin.loop == position]
            done = position in self._fused or any(var in self._values for var in eqn.outvars)
            if inside and not done:
                self._make(
                    self._before(position, [var for at in inside for var in self._fused[at].needs])
                )
                self._run_fused(eqn, inside)
            elif not done and (acts(eqn) or not self._kept.isdisjoint(eqn.outvars)):
                outputs = run_as_it_is(
                    self._program, eqn, [self._value(atom) for atom in eqn.invars]
                )
                self._values.update(zip(eqn.outvars, outputs))

    def _before(self, loop: int, values: Iterable[Var]) -> list[int]:
        """Positions of the equations after a loop that compute some values."""
        ids = set(map(id, makers(self._eqns[loop + 1 :], values)))
        return [position for position, eqn in enumerate(self._eqns) if id(eqn) in ids]

    def _run_fused(self, loop: JaxprEqn, inside: Sequence[int]) -> None:
        """Runs a loop with the loops at the positions `inside` fused into it."""
        body, options = scan_body(loop)
        consts, carry, layered = loop_parts(loop, loop.invars)
        const_values = [self._value(atom) for atom in consts]
        count = len(carry)
        stacks = loop.outvars[count:]
        is_read = [var in self._kept for var in stacks]
        more_stacks = list(dict.fromkeys(var for at in inside for var in self._beside(at)))

        def run_round(state: list[Array], entries: tuple[list[Array], list[Array]]) -> Any:
            outputs = jaxpr_as_fun(body)(*const_values, *state, *entries[0])
            layers = {var: layer[None] for var, layer in zip(stacks, outputs[count:])} | dict(
                zip(more_stacks, entries[1])
            )
            fused_outputs = [self._one_round(at, layers, options["length"]) for at in inside]
            read_layers = [layer for layer, read in zip(outputs[count:], is_read) if read]
            return outputs[:count], (read_layers, fused_outputs)

        with named_as(loop):
            entries = (
                [self._value(atom) for atom in layered],
                [self._rows(var, options["length"]) for var in more_stacks],
            )
            state, (read_stacks, fused_outputs) = jax.lax.scan(
                run_round, [self._value(atom) for atom in carry], entries, **options
            )
        self._values.update(zip(loop.outvars, state))
        self._values.update(zip([var for var, read in zip(stacks, is_read) if read], read_stacks))
        for at, outputs in zip(inside, fused_outputs):
            self._values.update(zip(self._eqns[at].outvars, outputs))

    def _beside(self, at: int) -> Iterator[Var]:
        """The stacks that a fused loop reads in addition to those of its host loop."""
        origin = self._fused[at]
        _, _, layered = loop_parts(self._eqns[at], self._eqns[at].invars)
        read = chain(variables(layered), *map(rows_read, origin.between))
        return (var for var in read if var in origin.needs)

    def _rows(self, var: Var, length: int) -> Any:
        return self._value(var).reshape(length, *row_dims(var, length))

    def _one_round(self, at: int, layers: Mapping[Var, Array], length: int) -> list[Any]:
        """Runs a round of a fused loop on some layers; returns its outputs."""
        eqn = self._eqns[at]
        values = dict(layers)
        for step in self._fused[at].between:
            read = rows_read(step)
            inputs = [values[atom] if atom in read else self._value(atom) for atom in step.invars]
            with named_as(step):
                out = step.outvars[0]
                if step.primitive.name in RESHAPES:
                    values[out] = inputs[0].reshape(row_dims(out, length))
                else:
                    values[out] = run_again(step, inputs)
        consts, _, layered = loop_parts(eqn, eqn.invars)
        inputs = [values[atom].reshape(form_of(atom)[0][1:]) for atom in layered]
        with named_as(eqn):
            return jaxpr_as_fun(scan_body(eqn)[0])(*map(self._value, consts), *inputs)

    def _value(self, atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else self._values[atom]
