"""Fuses loops: what one loop makes of the rows of an earlier loop, that loop can make in its own rounds.

`lax.scan` over stacked layers makes the gradients of all layers, a row in each round. A loop behind it sums these rows
over replicas. If both are one loop, the sum of a row travels while the next row is computed. Each equation is given
what it was given before, so that no number changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jax

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
    """Makes a function whose loops that speak to other replicas run inside the loops that make their rows.

    A loop is fused if it carries nothing, and if its rows are made row by row of what one other loop makes and of what
    is there before that loop. All others stay as they are.

    Args:
      f: a function of trees of arrays.

    Returns:
      The function, to be traced, with the same results.

    Example:
      >>> def rows_and_sums(x):
      ...     _, rows = jax.lax.scan(lambda a, b: (a + b, a * b), 0.0, x)
      ...     return jax.lax.map(lambda row: jax.lax.psum(row, "replica"), 2 * rows)
      >>> count = lambda f, x: str(jax.make_jaxpr(f, axis_env=[("replica", 2)])(x)).count("scan[")
      >>> count(rows_and_sums, jax.numpy.ones(3)), count(fused_loops(rows_and_sums), jax.numpy.ones(3))
      (2, 1)
    """

    def fused(*args: Any) -> Any:
        closed, forms = jax.make_jaxpr(f, return_shape=True)(*args)
        made = _Fusing(straighten(closed), jax.tree.leaves(args)).run()
        return jax.tree.unflatten(jax.tree.structure(forms), made)

    return fused


class _Fusing:
    """A program that is being run under a trace, some of its loops inside of others."""

    def __init__(self, program: ClosedJaxpr, args: Sequence[Any]) -> None:
        self._program = program
        self._eqns = program.jaxpr.eqns
        self._values: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts))
        self._values.update(zip(program.jaxpr.invars, args))
        self._fused = dict(self._fusions())
        self._kept = self._read()

    def run(self) -> list[Any]:
        """Runs it; gives its outputs."""
        self._make(range(len(self._eqns)))
        return [self._value(atom) for atom in self._program.jaxpr.outvars]

    def _fusions(self) -> Iterator[tuple[int, Origin]]:
        """The places of the loops that are to run inside of others, and where their rows come from."""
        found = set[int]()
        for place, eqn in enumerate(self._eqns):
            if eqn.primitive.name != "scan":
                continue
            body, how = scan_body(eqn)
            consts, carry, rows = loop_parts(eqn, eqn.invars)
            origin = None if carry or not collectives(body) else origin_of(self._program.jaxpr, rows, consts, place)
            alike = origin and scan_body(self._eqns[origin.loop])[1]["length"] == how["length"]
            if origin and alike and origin.loop not in found:
                found.add(place)
                yield place, origin

    def _read(self) -> set[Var]:
        """The values that somebody reads outside of the loops that make them."""
        read = set(variables(self._program.jaxpr.outvars))
        inside = {origin.loop: origin.needs for origin in self._fused.values()}
        for place, eqn in reversed(list(enumerate(self._eqns))):
            if place in self._fused:
                read |= self._fused[place].needs
            elif acts(eqn) or place in inside or not read.isdisjoint(eqn.outvars):
                read.update(variables(eqn.invars))
        return read

    def _make(self, places: Iterable[int]) -> None:
        """Runs the equations at these places, in order, those that somebody needs and that have not run yet."""
        for place in places:
            eqn = self._eqns[place]
            inside = [at for at, origin in self._fused.items() if origin.loop == place]
            done = place in self._fused or any(var in self._values for var in eqn.outvars)
            if inside and not done:
                self._make(self._before(place, [var for at in inside for var in self._fused[at].needs]))
                self._run_fused(eqn, inside)
            elif not done and (acts(eqn) or not self._kept.isdisjoint(eqn.outvars)):
                made = run_as_it_is(self._program, eqn, [self._value(atom) for atom in eqn.invars])
                self._values.update(zip(eqn.outvars, made))

    def _before(self, loop: int, needed: Iterable[Var]) -> list[int]:
        """The places of the equations behind a loop that make values which it needs."""
        ids = set(map(id, makers(self._eqns[loop + 1 :], needed)))
        return [place for place, eqn in enumerate(self._eqns) if id(eqn) in ids]

    def _run_fused(self, loop: JaxprEqn, inside: Sequence[int]) -> None:
        """Runs a loop with others inside of it."""
        body, how = scan_body(loop)
        consts, carry, rows = loop_parts(loop, loop.invars)
        fixed = [self._value(atom) for atom in consts]
        count = len(carry)
        own = loop.outvars[count:]
        keeps = [var in self._kept for var in own]
        beside = list(dict.fromkeys(var for at in inside for var in self._beside(at)))

        def one(state: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
            made = jaxpr_as_fun(body)(*fixed, *state, *given[0])
            there = {var: row[None] for var, row in zip(own, made[count:])} | dict(zip(beside, given[1]))
            more = [self._one_round(at, there, how["length"]) for at in inside]
            kept = [row for row, keep in zip(made[count:], keeps) if keep]
            return made[:count], (kept, more)

        with named_as(loop):
            given = [self._value(atom) for atom in rows], [self._rows(var, how["length"]) for var in beside]
            state, (kept, more) = jax.lax.scan(one, [self._value(atom) for atom in carry], given, **how)
        self._values.update(zip(loop.outvars, state))
        self._values.update(zip([var for var, keep in zip(own, keeps) if keep], kept))
        for at, made in zip(inside, more):
            self._values.update(zip(self._eqns[at].outvars, made))

    def _beside(self, at: int) -> Iterator[Var]:
        """The arrays whose rows a fused loop reads beside those of the loop that it runs in."""
        origin = self._fused[at]
        _, _, rows = loop_parts(self._eqns[at], self._eqns[at].invars)
        read = chain(variables(rows), *map(rows_read, origin.between))
        return (var for var in read if var in origin.needs)

    def _rows(self, var: Var, length: int) -> Any:
        return self._value(var).reshape(length, *row_dims(var, length))

    def _one_round(self, at: int, there: Mapping[Var, Any], length: int) -> list[Any]:
        """Runs one round of a fused loop, given rows; gives its own rows."""
        eqn = self._eqns[at]
        made = dict(there)
        for step in self._fused[at].between:
            read = rows_read(step)
            given = [made[atom] if atom in read else self._value(atom) for atom in step.invars]
            with named_as(step):
                out = step.outvars[0]
                if step.primitive.name in RESHAPES:
                    made[out] = given[0].reshape(row_dims(out, length))
                else:
                    made[out] = run_again(step, given)
        consts, _, rows = loop_parts(eqn, eqn.invars)
        given = [made[atom].reshape(form_of(atom)[0][1:]) for atom in rows]
        with named_as(eqn):
            return jaxpr_as_fun(scan_body(eqn)[0])(*map(self._value, consts), *given)

    def _value(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self._values[atom]
