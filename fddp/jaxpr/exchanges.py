"""Takes a program's collectives over the replicas' axis out of it, to run between its stages.

The inputs of a collective become outputs of the program, and its results become inputs that arrive
later. Collectives inside loops and branches stay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_up
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
from fddp.jaxpr.equations import cheap, straighten, variables
from fddp.jaxpr.flow import arrival, flow
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
                operands.extend(read(var)[None] for var in _operands(eqns))
                received.update((var, next(results)[0]) for var in _results(eqns))
            return [received[var] for var in eqn.outvars]

        # Cheap equations after a batch's first collective may compute operands of later ones.
        values.run(_in_order(jaxpr.eqns, batches), exchange)
        return [*values.read_all(jaxpr.outvars), *operands]

    return Apart(run, tuple(exchanges))


def _batches(program: ClosedJaxpr, axis_name: str | None) -> list[list[JaxprEqn]]:
    """Groups the collectives, in order.

    A collective joins the last batch if its operands wait for no costly equation after the batch's
    first collective.
    """
    jaxpr = program.jaxpr
    positions = count_up()

    def last_positions(eqn: JaxprEqn, inputs: list[int]) -> list[int]:
        position = next(positions)
        return [max(inputs, default=-1) if cheap(eqn) else position] * len(eqn.outvars)

    last_costly = flow(jaxpr, [-1] * len(jaxpr.invars), last_positions, lambda atom: -1)
    batches = list[list[JaxprEqn]]()
    begin = 0
    for position, eqn in enumerate(jaxpr.eqns):
        if (
            eqn.primitive.name not in COLLECTIVES
            or axis_name not in axes_of(eqn)
            or not _operands([eqn])
        ):
            continue
        if batches and max(map(last_costly, eqn.invars), default=-1) < begin:
            batches[-1].append(eqn)
        else:
            batches.append([eqn])
            begin = position
    return batches


def _in_order(eqns: Sequence[JaxprEqn], batches: Sequence[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Orders the equations so that all operands of a batch precede its first collective."""
    maker = {var: eqn for eqn in eqns for var in eqn.outvars}
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
            inputs = [var for eqn in first.get(id(current), [current]) for var in eqn.invars]
            pending += [
                (maker[var], False)
                for var in inputs
                if not isinstance(var, Literal) and var in maker
            ]

    for eqn in eqns:
        put(eqn)
    return ordered


def _exchange(
    program: ClosedJaxpr, eqns: Sequence[JaxprEqn], when: Callable[[Var | Literal], int]
) -> Exchange:
    operands = _operands(eqns)
    results = _results(eqns)
    names = [
        "psum_scatter" if eqn.primitive.name == "reduce_scatter" else eqn.primitive.name
        for eqn in eqns
    ]
    forms = tuple(
        jax.ShapeDtypeStruct(
            (1, *var.aval.shape),  # pyright: ignore[reportAttributeAccessIssue]
            var.aval.dtype,  # pyright: ignore[reportAttributeAccessIssue]
        )
        for var in results
    )
    run = jaxpr_as_fun(make_program(program, eqns, operands, results))
    return Exchange(
        ", ".join(dict.fromkeys(names)),
        run,
        len(operands),
        forms,
        max(map(when, operands), default=0),
    )


def _operands(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)))


def _results(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return [var for eqn in eqns for var in eqn.outvars]
