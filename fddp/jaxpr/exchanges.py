"""Takes a program's collectives over the replicas' axis out of it, to run between its stages.

The inputs of a collective become outputs of the program, and its results become inputs that arrive
later. Collectives inside loops and branches stay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fddp.jax_internals import (
    COLLECTIVES,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    axes_of,
    jaxpr_as_fun,
    make_program,
)
from fddp.jaxpr.equations import form_of, outputs_of, read_by, straighten, variables
from fddp.jaxpr.flow import arrival, last_costly
from fddp.jaxpr.interpreter import Read, Values


@dataclass(frozen=True)
class Exchange:
    """Collectives that are launched together."""

    name: str
    """Their names in JAX, joined by commas."""
    run: Callable[..., list[Any]]
    """`run(*this replica's operands)` → results."""
    given: int
    """Number of operands."""
    back: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and dtypes of the results, with a first dim of 1."""
    after: int
    """Time of arrival of the last input that the operands depend on."""


class Apart(NamedTuple):
    """A program without its collectives."""

    run: Callable[..., list[Any]]
    """(*inputs, *results of exchanges) → [*outputs, *operands of exchanges]; exchanged arrays have
    a first dim of 1."""
    exchanges: tuple[Exchange, ...]
    """The collectives, in order."""


def apart(closed: ClosedJaxpr, axis_name: str | None, arrivals: Mapping[int, int]) -> Apart | None:
    """Takes the collectives over an axis out of a program; None if it has none at the top level.

    `arrivals` maps the position of an input to its time of arrival, 0 if omitted.
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    batches = _batches(program, axis_name)
    if not batches:
        return None
    when = arrival(jaxpr, arrivals)
    exchanges = [_exchange(program, eqns, when) for eqns in batches]
    batch_of = {id(eqn): eqns for eqns in batches for eqn in eqns}

    def run(*args: Any) -> list[Any]:
        values = Values(program, args)
        results = iter(args[len(jaxpr.invars) :])
        operands = list[Any]()
        received = dict[Var, Any]()

        def exchange(eqn: JaxprEqn, read: Read) -> list[Any] | None:
            eqns = batch_of.get(id(eqn))
            if eqns is None:
                return None
            if eqn is eqns[0]:
                operands.extend(read(var)[None] for var in read_by(eqns))
                received.update((var, next(results)[0]) for var in outputs_of(eqns))
            return [received[var] for var in eqn.outvars]

        # Cheap equations after a batch's first collective may compute operands of later ones.
        values.run(_in_order(jaxpr.eqns, batches), exchange)
        return [*values.outputs(), *operands]

    return Apart(run, tuple(exchanges))


def _batches(program: ClosedJaxpr, axis_name: str | None) -> list[list[JaxprEqn]]:
    """Groups the collectives, in order.

    A collective joins the last batch if its operands wait for no costly equation after the batch's
    first collective.
    """
    when_costly = last_costly(program.jaxpr)
    batches = list[list[JaxprEqn]]()
    begin = 0
    for position, eqn in enumerate(program.jaxpr.eqns):
        over_axis = eqn.primitive.name in COLLECTIVES and axis_name in axes_of(eqn)
        if not over_axis or not read_by([eqn]):
            continue
        if batches and max(map(when_costly, eqn.invars), default=-1) < begin:
            batches[-1].append(eqn)
        else:
            batches.append([eqn])
            begin = position
    return batches


def _in_order(eqns: Sequence[JaxprEqn], batches: Sequence[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Orders the equations so that all operands of a batch precede its first collective."""
    maker = dict[Var, JaxprEqn]()
    for eqn in eqns:
        maker.update(dict.fromkeys(eqn.outvars, eqn))
    first = {id(batch[0]): batch for batch in batches}
    done = set[int]()
    ordered = list[JaxprEqn]()

    def put(eqn: JaxprEqn) -> None:
        pending = [(eqn, False)]
        while pending:
            current, ready = pending.pop()
            if id(current) in done:
                continue
            if ready:
                done.add(id(current))
                ordered.append(current)
                continue
            pending.append((current, True))
            for eqn in first.get(id(current), [current]):
                pending += [(maker[var], False) for var in variables(eqn.invars) if var in maker]

    for eqn in eqns:
        put(eqn)
    return ordered


def _exchange(
    program: ClosedJaxpr, eqns: Sequence[JaxprEqn], when: Callable[[Var | Literal], int]
) -> Exchange:
    operands = read_by(eqns)
    results = outputs_of(eqns)
    names = dict.fromkeys(eqn.primitive.name for eqn in eqns)
    forms = list[jax.ShapeDtypeStruct]()
    for form in map(form_of, results):
        forms.append(jax.ShapeDtypeStruct((1, *form.shape), form.dtype))
    run = jaxpr_as_fun(make_program(program, eqns, operands, results))
    after = max(map(when, operands), default=0)
    name = ", ".join(names).replace("reduce_scatter", "psum_scatter")
    return Exchange(name, run, len(operands), tuple(forms), after)
