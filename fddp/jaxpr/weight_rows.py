"""Lets loops over layers read rows of stacked weights alone, not of what is made of them.

A copy of a stack in 16 bits, made before a loop, or by the forward loop for the backward one, keeps all layers whole.
If each loop makes its row of it anew, a row of the weights is all that is ever needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fddp.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    jaxpr_as_fun,
    loop_parts,
    make_program,
    named_as,
    run_again,
    run_as_it_is,
    scan_body,
    without_dead_code,
)
from fddp.jaxpr.equations import cheap, makers, straighten, value_of, variables
from fddp.jaxpr.flow import flow
from fddp.jaxpr.part_kinds import RESHAPES
from fddp.jaxpr.rounds import form_of
from fddp.jaxpr.row_origins import row_dims, rows_read


class Rows(NamedTuple):
    """Stacked weights of which a loop is given a row in each round."""

    given: Any
    """An array with a row for each round, of which the round's weights are made."""
    bring: Callable[[Any], Mapping[int, Any]]
    """A row → the round's weights, by the numbers of inputs."""


def read_by_rows(closed: ClosedJaxpr, stacks: Mapping[int, int]) -> ClosedJaxpr:
    """Writes a program so that its loops make of rows of weights what they read of weights, as far as that is cheap.

    Args:
      closed: the program.
      stacks: number of an input that is a stack of weights → the number of its rows.

    Returns:
      The program, as one list of equations, without what nobody needs.

    Example:
      >>> import jax.numpy as jnp
      >>> f = lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w.astype(x.dtype))[0]
      >>> program = jax.make_jaxpr(f)(jnp.ones((3, 2, 2)), jnp.ones(2, jnp.bfloat16))
      >>> [eqn.primitive.name for eqn in read_by_rows(program, {0: 3}).jaxpr.eqns]
      ['scan']
    """
    program = straighten(closed)
    forms = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in program.in_avals]
    made = jax.make_jaxpr(lambda *args: _Rewriting(program, stacks, args).run())(*forms)
    less, needed = without_dead_code(straighten(made))
    return straighten(jax.make_jaxpr(lambda *args: jaxpr_as_fun(less)(*(args[k] for k in needed)))(*forms))


def read_whole(program: ClosedJaxpr, lengths: Mapping[Var, int]) -> set[Var]:
    """Finds the stacks that something else reads than loops, a row in each round.

    Args:
      program: the program.
      lengths: the stacks, and the number of rows of each.

    Returns:
      Those of them that have to be whole.
    """
    whole = set(variables(program.jaxpr.outvars))
    for eqn in program.jaxpr.eqns:
        rows = _rows_of(eqn)
        length = scan_body(eqn)[1]["length"] if rows else 0
        others = eqn.invars[: len(eqn.invars) - len(rows)]
        whole.update(variables(others), (var for var in variables(rows) if lengths.get(var) != length))
    return whole & lengths.keys()


def rows_needed(eqn: JaxprEqn, stacks: Mapping[Var, int]) -> list[int]:
    """The groups of the stacks of which an equation, a loop, reads rows."""
    return list(dict.fromkeys(stacks[var] for var in variables(_rows_of(eqn)) if var in stacks))


def run_by_rows(
    eqn: JaxprEqn, value: Callable[[Any], Any], stacks: Mapping[Var, tuple[int, int]], rows: Mapping[int, Rows]
) -> list[Any]:
    """Runs a loop under a trace, with weights that come row by row.

    Args:
      eqn: the loop.
      value: gives the value of a variable that is no such stack, or of a literal.
      stacks: the stacks → number of the input, and its group.
      rows: group → what its rows are made of.

    Returns:
      What the loop makes.
    """
    body, how = scan_body(eqn)
    consts, carry, read = loop_parts(eqn, eqn.invars)
    groups = list(dict.fromkeys(stacks[var][1] for var in variables(read) if var in stacks))
    others = [atom for atom in read if isinstance(atom, Literal) or atom not in stacks]
    fixed = list(map(value, consts))

    def one(state: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        came = {k: x for group, row in zip(groups, given[0]) for k, x in rows[group].bring(row).items()}
        left = iter(given[1])
        row = [came[stacks[atom][0]] if isinstance(atom, Var) and atom in stacks else next(left) for atom in read]
        made = jaxpr_as_fun(body)(*fixed, *state, *row)
        return made[: len(carry)], made[len(carry) :]

    with named_as(eqn):
        given = [rows[group].given for group in groups], list(map(value, others))
        state, made = jax.lax.scan(one, list(map(value, carry)), given, **how)
    return [*state, *made]


class _Made(NamedTuple):
    """A value that is made row by row, cheaply, of stacked weights alone."""

    length: int
    of: frozenset[Var]
    """The weights."""
    row: Callable[[Mapping[Var, Any]], Any]
    """The weights' rows → the value's row."""


class _Rewriting:
    """A program that is being run under a trace, its loops given rows of weights in place of what is made of them."""

    def __init__(self, program: ClosedJaxpr, stacks: Mapping[int, int], args: Sequence[Any]) -> None:
        jaxpr = program.jaxpr
        self._program = program
        self._values: dict[Var, Any] = dict(zip(jaxpr.constvars, program.consts)) | dict(zip(jaxpr.invars, args))
        self._made = {var: _itself(var, stacks[k]) for k, var in enumerate(jaxpr.invars) if k in stacks}

    def run(self) -> list[Any]:
        """Runs it; gives its outputs."""
        for eqn in self._program.jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                self._hand_on(eqn)
            elif rows := self._rows(eqn):
                self._loop(eqn, rows)
            else:
                made = run_as_it_is(self._program, eqn, list(map(self._value, eqn.invars)))
                self._values.update(zip(eqn.outvars, made))
                self._made.update(self._of_rows(eqn))
        return list(map(self._value, self._program.jaxpr.outvars))

    def _value(self, atom: Any) -> Any:
        return value_of(self._values, atom)

    def _hand_on(self, barrier: JaxprEqn) -> None:
        """Lets weights pass a barrier, which would need them whole: rows that come anew are computed with anew."""
        pairs = dict(zip(barrier.outvars, barrier.invars))
        weights = {var: atom for var, atom in pairs.items() if isinstance(atom, Var) and atom in self._made}
        self._values.update({var: self._values[atom] for var, atom in weights.items()})
        self._made.update({var: self._made[atom] for var, atom in weights.items()})
        others = [var for var in pairs if var not in weights]
        self._values.update(zip(others, jax.lax.optimization_barrier([self._value(pairs[var]) for var in others])))

    def _of_rows(self, eqn: JaxprEqn) -> Iterator[tuple[Var, _Made]]:
        """Finds the values that an equation makes, where they are cheap and made of rows of weights alone."""
        read = list(variables(eqn.invars))
        alone = read and all(var in self._made for var in read) and set(read) == set(rows_read(eqn))
        lengths = {self._made[var].length for var in read if var in self._made}
        if not alone or not cheap(eqn) or acts(eqn) or len(lengths) > 1:
            return
        (length,) = lengths
        (out,) = eqn.outvars
        if form_of(out)[0][:1] != (length,):
            return
        given = [self._made[atom] if isinstance(atom, Var) else atom.val for atom in eqn.invars]

        def row(rows: Mapping[Var, Any]) -> Any:
            one = [x.row(rows)[None] if isinstance(x, _Made) else x for x in given]
            with named_as(eqn):
                reshapes = eqn.primitive.name in RESHAPES
                return (one[0].reshape(row_dims(out, length)) if reshapes else run_again(eqn, one))[0]

        yield out, _Made(length, frozenset().union(*(self._made[var].of for var in read)), row)

    def _rows(self, eqn: JaxprEqn) -> dict[int, _Made]:
        """Those of the rows that a loop reads which are made of rows of weights, by their numbers."""
        rows = _rows_of(eqn)
        length = scan_body(eqn)[1]["length"] if rows else 0
        found = {k: self._made[atom] for k, atom in enumerate(rows) if isinstance(atom, Var) and atom in self._made}
        return {k: made for k, made in found.items() if made.length == length}

    def _loop(self, loop: JaxprEqn, rows: Mapping[int, _Made]) -> None:
        """Runs a loop that makes these rows itself; finds what it makes of them alone."""
        body, how = scan_body(loop)
        consts, carry, read = loop_parts(loop, loop.invars)
        weights = sorted(frozenset().union(*(made.of for made in rows.values())), key=self._program.jaxpr.invars.index)
        fixed = list(map(self._value, consts))

        def one(state: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
            there = dict(zip(weights, given[0]))
            left = iter(given[1])
            row = [rows[k].row(there) if k in rows else next(left) for k in range(len(read))]
            made = jaxpr_as_fun(body)(*fixed, *state, *row)
            return made[: len(carry)], made[len(carry) :]

        with named_as(loop):
            others = [self._value(atom) for k, atom in enumerate(read) if k not in rows]
            given = list(map(self._value, weights)), others
            state, made = jax.lax.scan(one, list(map(self._value, carry)), given, **how)
        self._values.update(zip(loop.outvars, [*state, *made]))
        self._made.update(_made_inside(loop, rows))


def _made_inside(loop: JaxprEqn, rows: Mapping[int, _Made]) -> Iterator[tuple[Var, _Made]]:
    """Finds the values that a loop makes row by row, where they are cheap and made of such rows alone."""
    body = straighten(scan_body(loop)[0])
    carried = len(loop_parts(loop, loop.invars)[1])
    inputs = loop_parts(loop, body.jaxpr.invars)[2]
    given = {inputs[k]: made for k, made in rows.items()}
    length = scan_body(loop)[1]["length"]

    def through(eqn: JaxprEqn, of: list[bool]) -> list[bool]:
        alone = any(of) and all(one or isinstance(atom, Literal) for one, atom in zip(of, eqn.invars))
        return [alone and cheap(eqn) and not acts(eqn)] * len(eqn.outvars)

    alone = flow(body.jaxpr, [var in given for var in body.jaxpr.invars], through, lambda atom: False)
    for out, inner in list(zip(loop.outvars, body.jaxpr.outvars))[carried:]:
        if alone(inner):
            part = make_program(body, makers(body.jaxpr.eqns, [inner]), list(given), [inner])
            of = frozenset().union(*(made.of for made in given.values()))

            def row(there: Mapping[Var, Any], part: ClosedJaxpr = part) -> Any:
                return jaxpr_as_fun(part)(*(made.row(there) for made in given.values()))[0]

            yield out, _Made(length, of, row)


def _itself(var: Var, length: int) -> _Made:
    return _Made(length, frozenset([var]), lambda rows: rows[var])


def _rows_of(eqn: JaxprEqn) -> list[Any]:
    """The arrays of which a loop reads a row in each round; none of any other equation."""
    return loop_parts(eqn, eqn.invars)[2] if eqn.primitive.name == "scan" else []
