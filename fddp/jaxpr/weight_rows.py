"""Moves cheap work on stacked weights, such as a cast, into the loops that read them.

A 16-bit copy of a stack, computed before a loop, or by the forward loop for the backward loop,
keeps all layers in memory. If each round computes its layer of the copy again, it needs a single
layer of the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


class LayerWeights(NamedTuple):
    """Stacked weights that a loop receives layer by layer."""

    given: Any
    """An array with an entry for each round, the source of the round's weights."""
    bring: Callable[[Any], Mapping[int, Any]]
    """Entry of a round → the round's weights, by the position of the input."""


def read_by_rows(closed: ClosedJaxpr, stacks: Mapping[int, int]) -> ClosedJaxpr:
    """Moves cheap equations on stacks of weights into the loops that read their results.

    `stacks` maps the position of an input, a stack, to its number of layers. The program is
    returned flat, without dead code.

    >>> import jax.numpy as jnp
    >>> f = lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w.astype(x.dtype))[0]
    >>> program = jax.make_jaxpr(f)(jnp.ones((3, 2, 2)), jnp.ones(2, jnp.bfloat16))
    >>> [eqn.primitive.name for eqn in read_by_rows(program, {0: 3}).jaxpr.eqns]
    ['scan']
    """
    program = straighten(closed)
    forms = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in program.in_avals
    ]
    rewritten = jax.make_jaxpr(lambda *args: _Rewriting(program, stacks, args).run())(*forms)
    live, reads = without_dead_code(straighten(rewritten))
    return straighten(
        jax.make_jaxpr(lambda *args: jaxpr_as_fun(live)(*(args[k] for k in reads)))(*forms)
    )


def read_whole(program: ClosedJaxpr, lengths: Mapping[Var, int]) -> set[Var]:
    """Finds the stacks with a reader other than loops over their layers.

    `lengths` maps a stack to its number of layers.
    """
    whole_reads = set(variables(program.jaxpr.outvars))
    for eqn in program.jaxpr.eqns:
        layered = _rows_of(eqn)
        length = scan_body(eqn)[1]["length"] if layered else 0
        unlayered = eqn.invars[: len(eqn.invars) - len(layered)]
        whole_reads.update(
            variables(unlayered), (var for var in variables(layered) if lengths.get(var) != length)
        )
    return whole_reads & lengths.keys()


def rows_needed(eqn: JaxprEqn, stacks: Mapping[Var, int]) -> list[int]:
    """The groups of the stacks that an equation reads layer by layer."""
    return list(dict.fromkeys(stacks[var] for var in variables(_rows_of(eqn)) if var in stacks))


def run_by_rows(
    eqn: JaxprEqn,
    value: Callable[[Var | Literal], Array],
    stacks: Mapping[Var, tuple[int, int]],
    sources: Mapping[int, LayerWeights],
) -> list[Any]:
    """Runs a loop under a trace, with weights that arrive layer by layer; returns its outputs.

    `value` evaluates all inputs except the stacks. `stacks` maps a stack to the position of its
    input and to its group, and `sources` maps a group to the source of its layers.
    """
    body, options = scan_body(eqn)
    consts, carry, layered = loop_parts(eqn, eqn.invars)
    groups = list(dict.fromkeys(stacks[var][1] for var in variables(layered) if var in stacks))
    plain = [atom for atom in layered if isinstance(atom, Literal) or atom not in stacks]
    const_values = list(map(value, consts))

    def run_round(
        state: list[Array], entries: tuple[list[Array], list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        weights = {
            k: x
            for group, entry in zip(groups, entries[0])
            for k, x in sources[group].bring(entry).items()
        }
        next_plain = iter(entries[1])
        layers = [
            weights[stacks[atom][0]]
            if isinstance(atom, Var) and atom in stacks
            else next(next_plain)
            for atom in layered
        ]
        outputs = jaxpr_as_fun(body)(*const_values, *state, *layers)
        return outputs[: len(carry)], outputs[len(carry) :]

    with named_as(eqn):
        entries = [sources[group].given for group in groups], list(map(value, plain))
        state, outputs = jax.lax.scan(run_round, list(map(value, carry)), entries, **options)
    return [*state, *outputs]


class _Made(NamedTuple):
    """A stack computed layer by layer, cheaply, from stacked weights alone."""

    length: int
    of: frozenset[Var]
    """The weights."""
    row: Callable[[Mapping[Var, Any]], Any]
    """Layers of the weights → the layer of this stack."""


class _Rewriting:
    """Runs a program under a trace, with cheap work on weights inside of its loops."""

    def __init__(
        self, program: ClosedJaxpr, stacks: Mapping[int, int], args: Sequence[Array]
    ) -> None:
        jaxpr = program.jaxpr
        self._program = program
        self._values: dict[Var, Any] = dict(zip(jaxpr.constvars, program.consts)) | dict(
            zip(jaxpr.invars, args)
        )
        self._made = {
            var: _itself(var, stacks[k]) for k, var in enumerate(jaxpr.invars) if k in stacks
        }

    def run(self) -> list[Any]:
        """Runs the program; returns its outputs."""
        for eqn in self._program.jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                self._hand_on(eqn)
            elif layers := self._rows(eqn):
                self._loop(eqn, layers)
            else:
                outputs = run_as_it_is(self._program, eqn, list(map(self._value, eqn.invars)))
                self._values.update(zip(eqn.outvars, outputs))
                self._made.update(self._of_rows(eqn))
        return list(map(self._value, self._program.jaxpr.outvars))

    def _value(self, atom: Var | Literal) -> Any:
        return value_of(self._values, atom)

    def _hand_on(self, barrier: JaxprEqn) -> None:
        """Passes weights around a barrier, which would need them whole.

        The barrier forces a second computation; layers that arrive again cause it anyway.
        """
        pairs = dict(zip(barrier.outvars, barrier.invars))
        weights = {
            var: atom for var, atom in pairs.items() if isinstance(atom, Var) and atom in self._made
        }
        self._values.update({var: self._values[atom] for var, atom in weights.items()})
        self._made.update({var: self._made[atom] for var, atom in weights.items()})
        plain = [var for var in pairs if var not in weights]
        self._values.update(
            zip(plain, jax.lax.optimization_barrier([self._value(pairs[var]) for var in plain]))
        )

    def _of_rows(self, eqn: JaxprEqn) -> Iterator[tuple[Var, _Made]]:
        """Yields the output of a cheap equation that reads layers of weights alone."""
        read = list(variables(eqn.invars))
        reads_weights = (
            read and all(var in self._made for var in read) and set(read) == set(rows_read(eqn))
        )
        lengths = {self._made[var].length for var in read if var in self._made}
        if not reads_weights or not cheap(eqn) or acts(eqn) or len(lengths) > 1:
            return
        (length,) = lengths
        (out,) = eqn.outvars
        if form_of(out)[0][:1] != (length,):
            return
        operands = [self._made[atom] if isinstance(atom, Var) else atom.val for atom in eqn.invars]

        def layer(layers: Mapping[Var, Array]) -> Any:
            values = [x.row(layers)[None] if isinstance(x, _Made) else x for x in operands]
            with named_as(eqn):
                reshapes = eqn.primitive.name in RESHAPES
                return (
                    values[0].reshape(row_dims(out, length)) if reshapes else run_again(eqn, values)
                )[0]

        yield out, _Made(length, frozenset().union(*(self._made[var].of for var in read)), layer)

    def _rows(self, eqn: JaxprEqn) -> dict[int, _Made]:
        """Selects the layered inputs of a loop that depend on weights alone."""
        layered = _rows_of(eqn)
        length = scan_body(eqn)[1]["length"] if layered else 0
        stacks = {
            k: self._made[atom]
            for k, atom in enumerate(layered)
            if isinstance(atom, Var) and atom in self._made
        }
        return {k: stack for k, stack in stacks.items() if stack.length == length}

    def _loop(self, loop: JaxprEqn, stacks: Mapping[int, _Made]) -> None:
        """Runs a loop whose rounds compute the layers of `stacks`."""
        body, options = scan_body(loop)
        consts, carry, layered = loop_parts(loop, loop.invars)
        weights = sorted(
            frozenset().union(*(stack.of for stack in stacks.values())),
            key=self._program.jaxpr.invars.index,
        )
        const_values = list(map(self._value, consts))

        def run_round(
            state: list[Array], entries: tuple[list[Array], list[Array]]
        ) -> tuple[list[Array], list[Array]]:
            weight_layers = dict(zip(weights, entries[0]))
            next_plain = iter(entries[1])
            layers = [
                stacks[k].row(weight_layers) if k in stacks else next(next_plain)
                for k in range(len(layered))
            ]
            outputs = jaxpr_as_fun(body)(*const_values, *state, *layers)
            return outputs[: len(carry)], outputs[len(carry) :]

        with named_as(loop):
            plain = [self._value(atom) for k, atom in enumerate(layered) if k not in stacks]
            entries = list(map(self._value, weights)), plain
            state, outputs = jax.lax.scan(
                run_round, list(map(self._value, carry)), entries, **options
            )
        self._values.update(zip(loop.outvars, [*state, *outputs]))
        self._made.update(_made_inside(loop, stacks))


def _made_inside(loop: JaxprEqn, stacks: Mapping[int, _Made]) -> Iterator[tuple[Var, _Made]]:
    """Yields the outputs that a loop computes cheaply from the layers of `stacks` alone."""
    body = straighten(scan_body(loop)[0])
    carried = len(loop_parts(loop, loop.invars)[1])
    inputs = loop_parts(loop, body.jaxpr.invars)[2]
    sources = {inputs[k]: stack for k, stack in stacks.items()}
    length = scan_body(loop)[1]["length"]

    def through(eqn: JaxprEqn, marks: list[bool]) -> list[bool]:
        only_stacks = any(marks) and all(
            mark or isinstance(atom, Literal) for mark, atom in zip(marks, eqn.invars)
        )
        return [only_stacks and cheap(eqn) and not acts(eqn)] * len(eqn.outvars)

    from_stacks = flow(
        body.jaxpr, [var in sources for var in body.jaxpr.invars], through, lambda atom: False
    )
    for out, inner in list(zip(loop.outvars, body.jaxpr.outvars))[carried:]:
        if from_stacks(inner):
            program = make_program(body, makers(body.jaxpr.eqns, [inner]), list(sources), [inner])
            weights = frozenset().union(*(stack.of for stack in sources.values()))

            def layer(layers: Mapping[Var, Array], program: ClosedJaxpr = program) -> Any:
                return jaxpr_as_fun(program)(*(stack.row(layers) for stack in sources.values()))[0]

            yield out, _Made(length, weights, layer)


def _itself(var: Var, length: int) -> _Made:
    return _Made(length, frozenset([var]), lambda layers: layers[var])


def _rows_of(eqn: JaxprEqn) -> list[Any]:
    """The inputs that a loop reads layer by layer; none for any other equation."""
    return loop_parts(eqn, eqn.invars)[2] if eqn.primitive.name == "scan" else []
