"""Moves cheap work on stacked weights, such as a cast, into the loops that read them.

A 16-bit copy of a stack, computed before a loop, or by the forward loop for the backward loop,
keeps all layers in memory. If each round computes its layer of the copy again, it needs a single
layer of the weights.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    jaxpr_as_fun,
    loop_parts,
    make_program,
    scan_body,
    without_dead_code,
)
from fddp.jaxpr.equations import cheap, form_of, makers, straighten, variables
from fddp.jaxpr.flow import flow
from fddp.jaxpr.interpreter import Read, interpret
from fddp.jaxpr.loops.row_origins import rows_read, run_on_layers
from fddp.jaxpr.loops.scan import run_scan

Item = TypeVar("Item")


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
    rewritten = jax.make_jaxpr(
        lambda *args: interpret(program, args, _Moving(program.jaxpr, stacks).move)
    )(*forms)
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
        layered, length = _layered(eqn)
        whole_reads.update(variables(eqn.invars[: len(eqn.invars) - len(layered)]))
        for var in variables(layered):
            if lengths.get(var) != length:
                whole_reads.add(var)
    return whole_reads & lengths.keys()


def rows_needed(eqn: JaxprEqn, stacks: Mapping[Var, int]) -> list[int]:
    """The groups of the stacks that an equation reads layer by layer."""
    rows = filter(stacks.__contains__, variables(_layered(eqn)[0]))
    return list(dict.fromkeys(map(stacks.__getitem__, rows)))


def run_by_rows(
    eqn: JaxprEqn,
    read: Read,
    stacks: Mapping[Var, tuple[int, int]],
    sources: Mapping[int, LayerWeights],
) -> list[Any]:
    """Runs a loop under a trace, with weights that arrive layer by layer; returns its outputs.

    `read` evaluates all inputs except the stacks. `stacks` maps a stack to the position of its
    input and to its group, and `sources` maps a group to the source of its layers.
    """
    groups = rows_needed(eqn, {var: group for var, (_, group) in stacks.items()})
    positions = dict[int, int]()
    for k, atom in enumerate(_layered(eqn)[0]):
        if isinstance(atom, Var) and atom in stacks:
            positions[k] = stacks[atom][0]

    def layers(entries: list[Any]) -> dict[int, Any]:
        weights = dict[int, Any]()
        for group, entry in zip(groups, entries):
            weights.update(sources[group].bring(entry))
        return dict(zip(positions, map(weights.__getitem__, positions.values())))

    entries = [sources[group].given for group in groups]
    return _run_with_layers(eqn, read, positions, entries, layers)


def cheap_sources(
    jaxpr: Jaxpr, inputs: Sequence[frozenset[Item]]
) -> Callable[[Var | Literal], frozenset[Item]]:
    """Returns value → its sources, if it is a cheap function of inputs with sources alone.

    `inputs` are the sources of the program's inputs. All other values have no sources.
    """
    nothing = frozenset[Item]()

    def through(eqn: JaxprEqn, sets: list[frozenset[Item]]) -> list[frozenset[Item]]:
        complete = all(map(lambda x, sources: sources or isinstance(x, Literal), eqn.invars, sets))
        if not complete or not cheap(eqn) or acts(eqn):
            return [nothing] * len(eqn.outvars)
        return [nothing.union(*sets)] * len(eqn.outvars)

    return flow(jaxpr, inputs, through, lambda atom: nothing)


class _Stack(NamedTuple):
    """A stack computed layer by layer, cheaply, from stacked weights alone."""

    length: int
    weights: frozenset[Var]
    layer: Callable[[Mapping[Var, Any]], Any]
    """Layers of the weights → the layer of this stack."""


class _Moving:
    """Moves cheap work on weights into the loops of a program."""

    def __init__(self, jaxpr: Jaxpr, lengths: Mapping[int, int]) -> None:
        self._inputs = jaxpr.invars
        self._stacks = dict[Var, _Stack]()
        for position, length in lengths.items():
            var = jaxpr.invars[position]
            self._stacks[var] = _Stack(length, frozenset([var]), itemgetter(var))

    def move(self, eqn: JaxprEqn, read: Read) -> list[Any] | None:
        """Runs an equation that reads layers of weights alone; returns None for any other."""
        if eqn.primitive.name == "optimization_barrier":
            return self._hand_on(eqn, read)
        layered, length = _layered(eqn)
        stacks = dict[int, _Stack]()
        for k, stack in enumerate(map(self._stack, layered)):
            if stack and stack.length == length:
                stacks[k] = stack
        if stacks:
            return self._loop(eqn, stacks, read)
        self._stacks.update(self._cheap_stack(eqn, read))
        return None

    def _stack(self, atom: Var | Literal) -> _Stack | None:
        return self._stacks.get(atom) if isinstance(atom, Var) else None

    def _hand_on(self, barrier: JaxprEqn, read: Read) -> list[Any]:
        """Passes weights around a barrier, which would need them whole.

        The barrier forces a second computation; layers that arrive again cause it anyway.
        """
        plain = [atom for atom in barrier.invars if not self._stack(atom)]
        barred = iter(jax.lax.optimization_barrier(list(map(read, plain))))
        outputs = list[Any]()
        for var, atom in zip(barrier.outvars, barrier.invars):
            if stack := self._stack(atom):
                self._stacks[var] = stack
            outputs.append(read(atom) if stack else next(barred))
        return outputs

    def _cheap_stack(self, eqn: JaxprEqn, read: Read) -> Iterator[tuple[Var, _Stack]]:
        """Yields the output of a cheap equation that reads layers of weights alone."""
        inputs = set(variables(eqn.invars))
        if not inputs or not inputs <= self._stacks.keys() or inputs != set(rows_read(eqn)):
            return
        stacks = list(map(self._stack, eqn.invars))
        (length, *more_lengths) = {stack.length for stack in stacks if stack}
        if more_lengths or not cheap(eqn) or acts(eqn):
            return
        (out,) = eqn.outvars
        if form_of(out).shape[:1] != (length,):
            return

        def layer(layers: Mapping[Var, Array]) -> Any:
            operands = list[Any]()
            for stack, atom in zip(stacks, eqn.invars):
                operands.append(stack.layer(layers)[None] if stack else read(atom))
            return run_on_layers(eqn, operands, length)[0]

        yield out, _Stack(length, _weights(filter(None, stacks)), layer)

    def _loop(self, loop: JaxprEqn, stacks: Mapping[int, _Stack], read: Read) -> list[Any]:
        """Runs a loop whose rounds compute the layers of `stacks`."""
        weights = sorted(_weights(stacks.values()), key=self._inputs.index)

        def layers(entries: list[Array]) -> dict[int, Any]:
            weight_layers = dict(zip(weights, entries))
            return {k: stack.layer(weight_layers) for k, stack in stacks.items()}

        self._stacks.update(_stacks_inside(loop, stacks))
        return _run_with_layers(loop, read, stacks, list(map(read, weights)), layers)


def _run_with_layers(
    loop: JaxprEqn,
    read: Read,
    replaced: Collection[int],
    entries: list[Any],
    layers_of: Callable[[list[Any]], dict[int, Any]],
) -> list[Any]:
    """Runs a loop whose rounds compute some of its layers; returns its outputs.

    `replaced` are the numbers of these layers among all, and `layers_of` computes them from a
    round's entries.
    """
    consts, carry, layered = loop_parts(loop, loop.invars)
    plain = [k for k in range(len(layered)) if k not in replaced]

    def run_round(before: list[Any], rows: tuple[list[Any], list[Any]]) -> list[Any]:
        layers = layers_of(rows[0]) | dict(zip(plain, rows[1]))
        inputs = map(layers.__getitem__, range(len(layered)))
        return jaxpr_as_fun(scan_body(loop)[0])(*before, *inputs)

    rows = entries, [read(layered[k]) for k in plain]
    return run_scan(loop, list(map(read, [*consts, *carry])), rows, run_round)


def _stacks_inside(loop: JaxprEqn, stacks: Mapping[int, _Stack]) -> Iterator[tuple[Var, _Stack]]:
    """Yields the outputs that a loop computes cheaply from the layers of `stacks` alone."""
    body = straighten(scan_body(loop)[0])
    carried = len(loop_parts(loop, loop.invars)[1])
    inputs = loop_parts(loop, body.jaxpr.invars)[2]
    sources = {inputs[k]: stack for k, stack in stacks.items()}
    is_cheap = cheap_sources(
        body.jaxpr, [frozenset([var] if var in sources else ()) for var in body.jaxpr.invars]
    )
    for out, inner in list(zip(loop.outvars, body.jaxpr.outvars))[carried:]:
        if is_cheap(inner):
            program = make_program(body, makers(body.jaxpr.eqns, [inner]), list(sources), [inner])

            def layer(layers: Mapping[Var, Array], program: ClosedJaxpr = program) -> Any:
                return jaxpr_as_fun(program)(*(stack.layer(layers) for stack in stacks.values()))[0]

            yield out, _Stack(scan_body(loop)[1]["length"], _weights(stacks.values()), layer)


def _weights(stacks: Iterable[_Stack]) -> frozenset[Var]:
    return frozenset[Var]().union(*(stack.weights for stack in stacks))


def _layered(eqn: JaxprEqn) -> tuple[list[Any], int]:
    """The inputs that a loop reads layer by layer, and its rounds; none for any other equation."""
    if eqn.primitive.name != "scan":
        return [], 0
    return loop_parts(eqn, eqn.invars)[2], scan_body(eqn)[1]["length"]
