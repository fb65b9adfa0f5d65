"""Finds values that a program computes, or could compute, slice by slice.

`lax.scan` over stacked layers returns the gradients of all layers at the end of the loop. If the
program reads them in slices of a few layers, a shorter loop of a few rounds can compute each slice.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    along_first_dim,
    jaxpr_as_fun,
    joins_first_dim,
    loop_parts,
    scan_body,
)
from fddp.jaxpr.equations import ELEMENTWISE, form_of, straighten, variables
from fddp.jaxpr.flow import flow

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each slice along the first dim; the slices cover the array from 0 on."""


class Stack(NamedTuple):
    """An array that a loop computes, a layer in each round."""

    loop: int
    """Position of the loop in its program."""
    length: int
    """Number of rounds, and of layers."""


def stacks(closed: ClosedJaxpr) -> dict[int, Stack]:
    """Finds the outputs that a scan computes, layer by layer; returns position → stack.

    Elementwise equations may follow the loop: a sum, a scale, a cast.

    >>> def loss(layers, x):
    ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0])
    >>> program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 3, 3)), jnp.ones((2, 3)))
    >>> {position: stack.length for position, stack in stacks(program).items()}
    {0: 4}
    """
    jaxpr = straighten(closed).jaxpr
    stack_of = _made_in_rounds(jaxpr)
    return {k: stack for k, stack in enumerate(map(stack_of, jaxpr.outvars)) if stack}


def in_slices(
    closed: ClosedJaxpr, inputs: Mapping[int, Bounds], outputs: Mapping[int, Bounds]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """Returns a function with slices in place of some arrays, and the forms of its inputs.

    `inputs` and `outputs` map the position of an array to its slices, which replace it in order.
    The function is to be traced.

    >>> program = jax.make_jaxpr(lambda x: (2 * x,))(jnp.arange(3.0))
    >>> run, forms = in_slices(program, {0: ((0, 1), (1, 3))}, {})
    >>> [form.shape for form in forms], run(jnp.zeros(1), jnp.ones(2))[0].tolist()
    ([(1,), (2,)], [0.0, 2.0, 2.0])
    """
    forms = list[jax.ShapeDtypeStruct]()
    counts = list[int]()
    for position, x in enumerate(closed.in_avals):
        bounds = inputs.get(position, ())
        shapes = [(end - begin, *x.shape[1:]) for begin, end in bounds] or [x.shape]
        counts.append(len(shapes))
        for shape in shapes:
            forms.append(jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type))

    def run(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        joined = list[Any]()
        for count in counts:
            slices = list(islice(remaining, count))
            joined.append(jnp.concatenate(slices) if count > 1 else slices[0])
        outputs_in_slices = list[Any]()
        for position, x in enumerate(jaxpr_as_fun(closed)(*joined)):
            slices = [jax.lax.slice_in_dim(x, *span) for span in outputs.get(position, ())]
            outputs_in_slices += slices or [x]
        return outputs_in_slices

    return run, forms


def _made_in_rounds(jaxpr: Jaxpr) -> Callable[[Var | Literal], Stack | None]:
    """Returns value → the loop that computes it layer by layer, or None."""
    positions = {id(eqn): position for position, eqn in enumerate(jaxpr.eqns)}

    def through(eqn: JaxprEqn, stacks: list[Stack | None]) -> list[Stack | None]:
        if eqn.primitive.name == "scan":
            length = scan_body(eqn)[1]["length"]
            carried = len(loop_parts(eqn, eqn.invars)[1])
            stacked = len(eqn.outvars) - carried
            return [None] * carried + [Stack(positions[id(eqn)], length)] * stacked
        sliced = _sliced_inputs(eqn)
        stack = next((stack for stack, x in zip(stacks, eqn.invars) if stack and x in sliced), None)
        return [stack] * len(eqn.outvars)

    return flow(jaxpr, [None] * len(jaxpr.invars), through, lambda atom: None)


def wanted_slices(
    jaxpr: Jaxpr, when: Callable[[Var | Literal], int], outputs: Sequence[Var | Literal]
) -> dict[Var, Bounds]:
    """Finds the values to compute slice by slice, and their slices.

    `when` maps a value to its time of arrival; `outputs` can be used slice by slice.
    """
    in_rounds = _made_in_rounds(jaxpr)
    joined = {eqn.outvars[0]: joined_bounds(eqn) for eqn in jaxpr.eqns if joins_first_dim(eqn)}
    spans_read: dict[Var, set[tuple[int, int]]] = {}
    used = set(variables(outputs))  # those that a loop or an elementwise equation reads in slices
    for eqn in jaxpr.eqns:
        span = along_first_dim(eqn)
        for source in variables(eqn.invars):
            if span and (in_rounds(source) or span in joined.get(source, ())):
                spans_read.setdefault(source, set()).add(span)
        if eqn.primitive.name == "scan":
            used.update(variables(loop_parts(eqn, eqn.invars)[2]))
        used.update(_sliced_inputs(eqn))
    slices = {var: bounds for var, spans in spans_read.items() if (bounds := _tiling(var, spans))}
    _spread_back(jaxpr, slices)
    for eqn in jaxpr.eqns:
        if joins_first_dim(eqn) and eqn.outvars[0] in used and all(map(when, eqn.invars)):
            slices.setdefault(eqn.outvars[0], joined[eqn.outvars[0]])
        for atom in _sliced_inputs(eqn):
            if atom in slices:
                slices.setdefault(eqn.outvars[0], slices[atom])
    _spread_back(jaxpr, slices)
    return slices


def _spread_back(jaxpr: Jaxpr, slices: dict[Var, Bounds]) -> None:
    """Propagates slices from the results of elementwise equations to their inputs."""
    for eqn in reversed(jaxpr.eqns):
        for atom in _sliced_inputs(eqn):
            if eqn.outvars[0] in slices:
                slices.setdefault(atom, slices[eqn.outvars[0]])


def _sliced_inputs(eqn: JaxprEqn) -> list[Var]:
    """The inputs that an elementwise equation reads slice by slice; none for any other."""
    return with_slices(eqn) if eqn.primitive.name in ELEMENTWISE else []


def joined_bounds(eqn: JaxprEqn) -> Bounds:
    """The slices that a concatenation joins."""
    lengths = [form_of(atom).shape[0] for atom in eqn.invars]
    return tuple(pairwise(accumulate(lengths, initial=0)))


def _tiling(var: Var, spans: set[tuple[int, int]]) -> Bounds | None:
    """The spans in order, if they are two or more and tile the first dim of an array."""
    bounds = tuple(sorted(spans))
    begins, ends = zip(*bounds)
    if len(bounds) > 1 and (*begins, form_of(var).shape[0]) == (0, *ends):
        return bounds
    return None


def with_slices(eqn: JaxprEqn) -> list[Var]:
    """The inputs of an elementwise equation that are sliced with its result; others stay whole."""
    dims = form_of(eqn.outvars[0]).shape

    def is_sliced(var: Var) -> bool:
        shape = form_of(var).shape
        return len(shape) == len(dims) and shape[:1] == dims[:1]

    return list(filter(is_sliced, variables(eqn.invars))) if dims else []
