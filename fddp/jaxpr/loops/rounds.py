"""Finds values that a program computes, or could compute, slice by slice.

`lax.scan` over stacked layers returns the gradients of all layers at the end of the loop. If the
program reads them in slices of a few layers, a shorter loop of a few rounds can compute each slice.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
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
from fddp.jaxpr.equations import ELEMENTWISE, straighten
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
    candidates = {position: stack_of(atom) for position, atom in enumerate(jaxpr.outvars)}
    return {position: stack for position, stack in candidates.items() if stack}


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
    forms = list[list[jax.ShapeDtypeStruct]]()
    for position, x in enumerate(closed.in_avals):
        shapes = [(end - begin, *x.shape[1:]) for begin, end in inputs.get(position, ())] or [
            x.shape
        ]
        forms.append(
            [jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type) for shape in shapes]
        )

    def run(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        slices = ([next(remaining) for _ in group] for group in forms)
        results = jaxpr_as_fun(closed)(
            *(group[0] if len(group) == 1 else jnp.concatenate(group) for group in slices)
        )
        result_slices = (
            [jax.lax.slice_in_dim(x, *span) for span in outputs.get(position, ())]
            for position, x in enumerate(results)
        )
        return [y for x, group in zip(results, result_slices) for y in group or [x]]

    return run, [form for group in forms for form in group]


def _made_in_rounds(jaxpr: Jaxpr) -> Callable[[Var | Literal], Stack | None]:
    """Returns value → the loop that computes it layer by layer, or None."""
    positions = {id(eqn): position for position, eqn in enumerate(jaxpr.eqns)}

    def through(eqn: JaxprEqn, stacks: list[Stack | None]) -> list[Stack | None]:
        if eqn.primitive.name == "scan":
            length = scan_body(eqn)[1]["length"]
            carried = len(loop_parts(eqn, eqn.invars)[1])
            stacked = len(eqn.outvars) - carried
            return [None] * carried + [Stack(positions[id(eqn)], length)] * stacked
        if eqn.primitive.name not in ELEMENTWISE:
            return [None] * len(eqn.outvars)
        return [
            next(
                (
                    stack
                    for stack, atom in zip(stacks, eqn.invars)
                    if stack and atom in with_slices(eqn)
                ),
                None,
            )
        ]

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
    for eqn in jaxpr.eqns:
        span = along_first_dim(eqn)
        source = eqn.invars[0] if span else None
        if (
            span
            and isinstance(source, Var)
            and (in_rounds(source) or span in joined.get(source, ()))
        ):
            spans_read.setdefault(source, set()).add(span)
    slices = {var: bounds for var, spans in spans_read.items() if (bounds := _tiling(var, spans))}
    _spread_back(jaxpr, slices)
    used = _used_in_slices(jaxpr).union(atom for atom in outputs if not isinstance(atom, Literal))
    for eqn in jaxpr.eqns:
        if joins_first_dim(eqn) and eqn.outvars[0] in used and all(map(when, eqn.invars)):
            slices.setdefault(eqn.outvars[0], joined[eqn.outvars[0]])
        if eqn.primitive.name in ELEMENTWISE:
            for atom in with_slices(eqn):
                if atom in slices:
                    slices.setdefault(eqn.outvars[0], slices[atom])
    _spread_back(jaxpr, slices)
    return slices


def _used_in_slices(jaxpr: Jaxpr) -> set[Var]:
    """The values that loops read layer by layer, or elementwise equations slice by slice."""
    loops = [loop_parts(eqn, eqn.invars)[2] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    elementwise = [with_slices(eqn) for eqn in jaxpr.eqns if eqn.primitive.name in ELEMENTWISE]
    return {
        atom
        for inputs in [*loops, *elementwise]
        for atom in inputs
        if not isinstance(atom, Literal)
    }


def _spread_back(jaxpr: Jaxpr, slices: dict[Var, Bounds]) -> None:
    """Propagates slices from the results of elementwise equations to their inputs."""
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in ELEMENTWISE and eqn.outvars[0] in slices:
            for atom in with_slices(eqn):
                slices.setdefault(atom, slices[eqn.outvars[0]])


def joined_bounds(eqn: JaxprEqn) -> Bounds:
    """The slices that a concatenation joins."""
    return tuple(pairwise(accumulate((form_of(atom)[0][0] for atom in eqn.invars), initial=0)))


def _tiling(var: Var, spans: set[tuple[int, int]]) -> Bounds | None:
    """The spans in order, if they are two or more and tile the first dim of an array."""
    bounds = tuple(sorted(spans))
    ends = [0, *(end for _, end in bounds)]
    fit = len(bounds) > 1 and all(begin == end for (begin, _), end in zip(bounds, ends))
    return bounds if fit and ends[-1] == form_of(var)[0][0] else None


def with_slices(eqn: JaxprEqn) -> list[Var]:
    """The inputs of an elementwise equation that are sliced with its result; others stay whole."""
    dims = form_of(eqn.outvars[0])[0]
    shapes = [(atom, form_of(atom)[0]) for atom in eqn.invars if not isinstance(atom, Literal)]
    return [
        atom for atom, shape in shapes if dims and len(shape) == len(dims) and shape[0] == dims[0]
    ]


def form_of(atom: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a value."""
    return tuple(atom.aval.shape), atom.aval.dtype
