"""Finds values computed from the layers of a loop, layer by layer, and their other inputs.

If these other inputs do not depend on the loop, the computation can move into the loop.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    joined_dim,
    loop_parts,
    named_as,
    pads_layers,
    permutes,
    run_again,
    scan_body,
)
from fddp.jaxpr.equations import (
    ELEMENTWISE,
    RESHAPES,
    form_of,
    maker_positions,
    makers,
    straighten,
    variables,
)


class Stack(NamedTuple):
    """An array that a loop computes, a layer in each round."""

    loop: int
    """Position of the loop in its program."""
    length: int
    """Number of rounds, and of layers."""


def computed_by_layer(closed: ClosedJaxpr) -> dict[int, Stack]:
    """Finds the outputs that a loop could compute to the end; returns position → stack."""
    jaxpr = straighten(closed).jaxpr
    stacks: dict[int, Stack] = {}
    if not any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return stacks
    for position, atom in enumerate(jaxpr.outvars):
        origin = origin_of(jaxpr, [atom], [], len(jaxpr.eqns))
        if origin:
            stacks[position] = Stack(origin.loop, scan_body(jaxpr.eqns[origin.loop])[1]["length"])
    return stacks


def places(closed: ClosedJaxpr) -> list[int]:
    """Positions of the equations that compute the outputs of a program; -1 without an equation."""
    jaxpr = straighten(closed).jaxpr
    maker = maker_positions(jaxpr)
    return [-1 if isinstance(atom, Literal) else maker.get(atom, -1) for atom in jaxpr.outvars]


class Origin(NamedTuple):
    """A loop, and the way from its layers to some values."""

    loop: int
    """Position of the loop in its program."""
    between: tuple[JaxprEqn, ...]
    """The equations from the loop's layers to the values, in order."""
    needs: frozenset[Var]
    """The other inputs of these equations; none depends on the loop."""


def origin_of(
    jaxpr: Jaxpr, values: Sequence[Var | Literal], whole_values: Sequence[Var | Literal], end: int
) -> Origin | None:
    """Finds the last loop whose layers some values are computed from, or None.

    The equation at position `end` reads `values` layer by layer, and `whole_values` whole. The
    whole values, and all other inputs on the way, must not depend on the loop.
    """
    position = _last_loop(jaxpr, values, end)
    if position is None:
        return None
    loop = jaxpr.eqns[position]
    length = scan_body(loop)[1]["length"]
    dependent = _reached(jaxpr.eqns[position:end], loop)
    layered = dependent.intersection(variables(values))
    needs = {*variables(values), *variables(whole_values)} - layered
    between: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns[position + 1 : end]):
        if layered.isdisjoint(eqn.outvars):
            continue
        read = set(layers_read(eqn))
        inputs = set(variables(eqn.invars))
        if not read or not _in_layers([*read, *eqn.outvars], length):
            return None
        between.append(eqn)
        layered |= inputs & dependent & read
        needs |= inputs - read | inputs - dependent
    carried = len(loop_parts(loop, loop.invars)[1])
    if not _in_layers(values, length) or not layered.isdisjoint(loop.outvars[:carried]):
        return None
    # Equations that move in front of this loop hold no loop, so that loops stay in order.
    moved = makers(jaxpr.eqns[position + 1 : end], needs)
    if not needs.isdisjoint(dependent) or any(eqn.primitive.name == "scan" for eqn in moved):
        return None
    return Origin(position, tuple(reversed(between)), frozenset(needs))


def _last_loop(jaxpr: Jaxpr, values: Sequence[Var | Literal], end: int) -> int | None:
    layered = set(variables(values))
    for position in reversed(range(end)):
        eqn = jaxpr.eqns[position]
        if layered.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name == "scan":
            return position
        layered.update(layers_read(eqn))
    return None


def _reached(eqns: Sequence[JaxprEqn], first: JaxprEqn) -> set[Var]:
    """The outputs of an equation, and the values that depend on them."""
    reached = set(first.outvars)
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def layers_read(eqn: JaxprEqn) -> list[Var]:
    """The inputs that an equation reads layer by layer; all others are read whole.

    A layer is an equal piece along the first dim. A reshape keeps the order of elements, and so the
    layers.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return in_rows_too(eqn)
    if name == "pad":
        return list(variables(eqn.invars[:1])) if pads_layers(eqn) else []
    keeps_order = name in RESHAPES and not permutes(eqn)
    extends = name == "concatenate" and joined_dim(eqn) > 0
    return list(variables(eqn.invars)) if keeps_order or extends else []


def run_on_layers(eqn: JaxprEqn, inputs: Sequence[Any], length: int) -> Array:
    """Runs an equation that reads layers on a single of `length` layers, under its name."""
    if eqn.primitive.name not in RESHAPES:
        return run_again(eqn, inputs)[0]
    with named_as(eqn):
        return inputs[0].reshape(layer_dims(eqn.outvars[0], length))


def _in_layers(atoms: Iterable[Var | Literal], length: int) -> bool:
    """Returns True if the first dims of arrays divide into `length` layers."""
    for shape in (form_of(atom).shape for atom in atoms):
        if not shape or not length or shape[0] % length:
            return False
    return True


def layer_dims(atom: Var | Literal, length: int) -> tuple[int, ...]:
    """The dims of each of `length` equal layers of an array."""
    first, *inner = form_of(atom).shape
    return first // length, *inner


def in_rows_too(eqn: JaxprEqn) -> list[Var]:
    """The inputs of an elementwise equation that have the layers of its result."""
    dims = form_of(eqn.outvars[0]).shape

    def is_sliced(var: Var) -> bool:
        shape = form_of(var).shape
        return len(shape) == len(dims) and shape[:1] == dims[:1]

    return list(filter(is_sliced, variables(eqn.invars))) if dims else []
