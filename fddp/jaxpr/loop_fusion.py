"""Fuses a loop into an earlier loop that computes its layers, round by round.

`lax.scan` over stacked layers computes the gradients of all layers, a layer in each round. A later
loop sums these layers over replicas. Fused, the sum of a layer overlaps with the computation of the
next layer. Each equation has the same inputs as before, so that no number changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import jax
from jaxtyping import Array

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    acts,
    jaxpr_as_fun,
    loop_parts,
    named_as,
    scan_body,
)
from fddp.jaxpr.equations import collectives, form_of, makers, straighten, variables
from fddp.jaxpr.fusible_loops import Origin, layer_dims, layers_read, origin_of, run_on_layers
from fddp.jaxpr.interpreter import Read, Values

Fusions: TypeAlias = Mapping[int, Origin]
"""Position of a fused loop → the origin of its layers, in a host loop."""
Guests: TypeAlias = dict[int, list[tuple[JaxprEqn, Origin]]]
"""`id` of a host loop → the loops that are fused into it."""


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
        outputs = _run(straighten(closed), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(forms), outputs)

    return fused


def _run(program: ClosedJaxpr, args: Sequence[Array]) -> list[Any]:
    jaxpr = program.jaxpr
    fusions = dict(_fusions(jaxpr))
    read_values = _read_outside(jaxpr, fusions)
    guests: Guests = {}
    for position, origin in fusions.items():
        guests.setdefault(id(jaxpr.eqns[origin.loop]), []).append((jaxpr.eqns[position], origin))
    fused_outputs = dict[int, list[Any]]()

    def run_host(eqn: JaxprEqn, read: Read) -> list[Any] | None:
        if id(eqn) not in guests:
            return fused_outputs.get(id(eqn))
        *outputs, by_guest = _run_fused(eqn, guests[id(eqn)], read_values, read)
        for (loop, _), loop_outputs in zip(guests[id(eqn)], by_guest):
            fused_outputs[id(loop)] = loop_outputs
        return outputs

    values = Values(program, args)
    values.run(_in_order(jaxpr, guests, read_values), run_host)
    return values.read_all(jaxpr.outvars)


def _fusions(jaxpr: Jaxpr) -> Iterator[tuple[int, Origin]]:
    """Yields the positions of the loops to fuse, and the origins of their layers."""
    fused = set[int]()
    for position, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan":
            continue
        body, options = scan_body(eqn)
        consts, carry, layered = loop_parts(eqn, eqn.invars)
        if carry or not collectives(body):
            continue
        origin = origin_of(jaxpr, layered, consts, position)
        if origin is None or origin.loop in fused:
            continue
        if scan_body(jaxpr.eqns[origin.loop])[1]["length"] == options["length"]:
            fused.add(position)
            yield position, origin


def _read_outside(jaxpr: Jaxpr, fusions: Fusions) -> set[Var]:
    """The values with a reader outside of the loop that computes them."""
    read = set(variables(jaxpr.outvars))
    hosts = {origin.loop for origin in fusions.values()}
    for position, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if position in fusions:
            read |= fusions[position].needs
        elif acts(eqn) or position in hosts or not read.isdisjoint(eqn.outvars):
            read.update(variables(eqn.invars))
    return read


def _in_order(jaxpr: Jaxpr, guests: Guests, read_values: set[Var]) -> list[JaxprEqn]:
    """The live equations; a host follows all that its fused loops need, and they follow it."""
    order = dict[int, JaxprEqn]()
    for position, eqn in enumerate(jaxpr.eqns):
        eqns = [eqn]
        if inside := guests.get(id(eqn)):
            needs = frozenset[Var]().union(*(origin.needs for _, origin in inside))
            eqns = [*makers(jaxpr.eqns[position + 1 :], needs), eqn, *(loop for loop, _ in inside)]
        elif not acts(eqn) and read_values.isdisjoint(eqn.outvars):
            continue
        for ordered in eqns:
            order.setdefault(id(ordered), ordered)
    return list(order.values())


def _run_fused(
    host: JaxprEqn, inside: Sequence[tuple[JaxprEqn, Origin]], read_values: set[Var], read: Read
) -> list[Any]:
    """Runs a loop with other loops fused into it."""
    body, options = scan_body(host)
    length = options["length"]
    consts, carry, layered = loop_parts(host, list(map(read, host.invars)))
    stacks = host.outvars[len(carry) :]
    more_stacks = list(dict.fromkeys(chain(*(_more_stacks(*guest) for guest in inside))))

    def run_round(before: list[Array], entries: tuple[list[Array], list[Array]]) -> Any:
        outputs = jaxpr_as_fun(body)(*consts, *before, *entries[0])
        layers = dict(zip(more_stacks, entries[1]))
        read_layers = list[Any]()
        for var, layer in zip(stacks, outputs[len(carry) :]):
            layers[var] = layer[None]
            read_layers.append(layer if var in read_values else None)
        by_guest = [_one_round(*guest, layers, length, read) for guest in inside]
        return outputs[: len(carry)], [*read_layers, by_guest]

    more_layers = [read(var).reshape(length, *layer_dims(var, length)) for var in more_stacks]
    with named_as(host):
        state, outputs = jax.lax.scan(run_round, carry, (layered, more_layers), **options)
    return [*state, *outputs]


def _more_stacks(loop: JaxprEqn, origin: Origin) -> list[Var]:
    """The stacks that a fused loop reads in addition to those of its host loop."""
    _, _, layered = loop_parts(loop, loop.invars)
    stacks = chain(variables(layered), *map(layers_read, origin.between))
    return list(filter(origin.needs.__contains__, stacks))


def _one_round(
    loop: JaxprEqn, origin: Origin, layers: Mapping[Var, Array], length: int, read: Read
) -> list[Any]:
    """Runs a round of a fused loop on some layers; returns its outputs."""
    values: dict[Any, Array] = dict(layers)
    for step in origin.between:
        layered = layers_read(step)
        inputs = [values[atom] if atom in layered else read(atom) for atom in step.invars]
        values[step.outvars[0]] = run_on_layers(step, inputs, length)
    consts, _, layered = loop_parts(loop, loop.invars)
    inputs = [values[atom].reshape(form_of(atom).shape[1:]) for atom in layered]
    with named_as(loop):
        return jaxpr_as_fun(scan_body(loop)[0])(*map(read, consts), *inputs)
