"""Finds the parameters that a loss truly used, while the loss is computed.

Where a branch is chosen at run time, the set of leaves that a value came from is chosen with it. From there on the set
is a mask, which is an array. All other sets are known from the program (see `used`), and their equations run unchanged.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fddp.jax_internals import (
    OWN_DERIVATIVE,
    REMATERIALISED,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    branches,
    called_program,
    jaxpr_as_fun,
    loop_parts,
    rematerialised,
    run_again,
    run_as_it_is,
    run_while,
    scan_body,
    while_programs,
    without_refs,
)
from fddp.jaxpr.used import NOTHING, Sets, Sources, can_have_gradient, flow_through, ignored_inputs, origins

Loss = TypeVar("Loss")
Aux = TypeVar("Aux")
Masks = tuple[Bool[Array | np.ndarray, " n"], ...]
"""The masks by their numbers: mask i marks the leaves that number i stands for."""
Masked = tuple[list[Any], list[Array]]
"""Values, and a mask for each that marks the leaves it came from."""


def tracked(
    f: Callable[[Sequence[Array]], tuple[Loss, Aux]],
) -> Callable[[Sequence[Array]], tuple[Loss, tuple[Aux, Bool[Array, " n"]]]]:
    """Makes a loss also tell which leaves it used.

    A leaf is used if a path leads from it to the loss, whatever the gradient along it: a product with zero is a path.
    Integers, booleans and `stop_gradient` end a path. Of branches only the one taken counts (`vmap` takes all). A loop
    used what any of its rounds used. A function with a derivative of its own also uses the inputs that its value
    ignores.

    Args:
      f: `f(leaves) -> (loss, aux)`, with arrays in `aux`; traceable by `jit`.

    Returns:
      `tracked(f)(leaves) -> (loss, (aux, used))` with the same values and gradients, computed once.

    Example:
      >>> import jax.numpy as jnp
      >>> f = lambda w: (jax.lax.cond(w[0] > 0, lambda: w[0] * w[1], lambda: w[0] * w[2]), w[3])
      >>> (loss, (aux, used)), grads = jax.value_and_grad(tracked(f), has_aux=True)([1.0, 2.0, 3.0, 4.0])
      >>> float(loss), used.tolist()
      (2.0, [True, True, False, False])
    """

    def with_use(leaves: Sequence[Array]) -> tuple[Loss, tuple[Aux, Bool[Array, " n"]]]:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(leaves)
        masks = tuple(np.eye(len(leaves), dtype=bool))
        values, sources, masks = _evaluate(without_refs(closed), list(leaves), origins(leaves), masks)
        loss, aux = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return loss, (aux, _mask(sources[0], masks))

    return with_use


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], inputs: Sets, masks: Masks) -> tuple[list[Any], Sets, Masks]:
    """Runs a program; gives its outputs, their sets, and the masks whose numbers are in these sets."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {**dict(zip(jaxpr.constvars, closed.consts)), **dict(zip(jaxpr.invars, args))}
    env: dict[Any, Sources] = dict(zip(jaxpr.invars, inputs))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def sources(atoms: Sequence[Any]) -> Sets:
        return [NOTHING if isinstance(atom, Literal) else env.get(atom, NOTHING) for atom in atoms]

    for eqn in jaxpr.eqns:
        given = [value(atom) for atom in eqn.invars]
        came_from = sources(eqn.invars)
        possible = flow_through(eqn, came_from, frozenset.union)
        certain = flow_through(eqn, came_from, frozenset.intersection)
        if possible == certain:
            made = run_as_it_is(closed, eqn, given)
        else:
            made, rows = _with_masks(eqn, given, came_from, masks)
            # A set that the run decides becomes a mask with a number of its own.
            named = (frozenset({len(masks) + k}) for k in range(len(rows)))
            possible = [a if a == b else name for a, b, name in zip(possible, certain, named)]
            masks = (*masks, *rows)
        values.update(zip(eqn.outvars, made))
        env.update(zip(eqn.outvars, possible))
    return [value(atom) for atom in jaxpr.outvars], sources(jaxpr.outvars), masks


def _with_masks(eqn: JaxprEqn, args: Sequence[Any], inputs: Sets, masks: Masks) -> Masked:
    """Runs an equation that decides which leaves are used; gives its outputs and their masks."""
    name = eqn.primitive.name
    if name == "cond":
        return jax.lax.switch(args[0], [partial(_call, b, inputs[1:], masks) for b in branches(eqn)], *args[1:])
    if name in ("scan", "while"):
        return {"scan": _scan, "while": _while}[name](eqn, args, inputs, masks)
    inner = partial(_call, called_program(eqn), inputs, masks)
    if name in REMATERIALISED:
        return rematerialised(inner, eqn)(*args)
    if name in OWN_DERIVATIVE:
        # The derivative's rule knows nothing of masks, so a second run finds them. It repeats the forward part as far
        # as the choice of a branch depends on it; nobody reads the rest, and XLA drops it.
        _, rows = inner(*(jax.lax.stop_gradient(x) for x in args))
        ignored = _mask(ignored_inputs(eqn, inputs), masks)
        return run_again(eqn, args), [row | ignored for row in rows]
    return inner(*args)


def _call(closed: ClosedJaxpr, inputs: Sets, masks: Masks, *args: Any) -> Masked:
    """Runs a program; gives its outputs and their masks."""
    values, sources, masks = _evaluate(closed, args, inputs, masks)
    return values, [_row(s, masks) for s in sources]


def _scan(eqn: JaxprEqn, args: Sequence[Any], inputs: Sets, masks: Masks) -> Masked:
    consts, carry, xs = loop_parts(eqn, args)
    of_consts, of_carry, of_xs = loop_parts(eqn, inputs)
    closed, options = scan_body(eqn)
    count = len(carry)

    def body(state: Any, x: list[Any]) -> Any:
        carry, rows, ever = state
        names, inside = _named(closed.jaxpr.outvars, rows, masks)
        values, rows = _call(closed, [*of_consts, *names, *of_xs], inside, *consts, *carry, *x)
        # The outputs of all rounds are one array, which used what any round used.
        ever = [a | b for a, b in zip(ever, rows[count:])]
        return (values[:count], rows[:count], ever), values[count:]

    none = [_row(NOTHING, masks) for _ in closed.jaxpr.outvars[count:]]
    (carry, rows, ever), ys = jax.lax.scan(body, (carry, [_row(s, masks) for s in of_carry], none), xs, **options)
    return [*carry, *ys], [*rows, *ever]


def _while(eqn: JaxprEqn, args: Sequence[Any], inputs: Sets, masks: Masks) -> Masked:
    of_test, consts, carry = loop_parts(eqn, args)
    _, of_consts, of_carry = loop_parts(eqn, inputs)
    test, closed = while_programs(eqn)

    def body(carry: list[Any], rows: list[Array]) -> Masked:
        names, inside = _named(closed.jaxpr.outvars, rows, masks)
        values, after = _call(closed, [*of_consts, *names], inside, *consts, *carry)
        # Under `vmap` a row that has ended keeps its value, and what it came from.
        rowwise = bool(test.out_avals[0].shape)  # pyright: ignore[reportAttributeAccessIssue]
        return values, [old | new for old, new in zip(rows, after)] if rowwise else after

    rows = [_row(s, masks) for s in of_carry]
    return run_while(eqn, lambda carry, _: jaxpr_as_fun(test)(*of_test, *carry)[0], body, carry, rows)


def _named(carry: Sequence[Any], rows: list[Array], masks: Masks) -> tuple[Sets, Masks]:
    """Gives a number to each mask of a loop's carry, and lists all masks that its body knows."""
    names = [frozenset({len(masks) + k}) if can_have_gradient(carry[k]) else NOTHING for k in range(len(rows))]
    return names, (*masks, *rows)


def _mask(sources: Sources, masks: Masks) -> Bool[Array, " n"]:
    """Turns a set into a mask."""
    none = np.zeros(masks[0].shape if masks else 0, bool)
    return jnp.asarray(reduce(or_, (masks[i] for i in sorted(sources)), none))


def _row(sources: Sources, masks: Masks) -> Bool[Array, " n"]:
    """Turns a set into a mask of the varying type in a `shard_map`: branches and rounds must agree on its type."""
    nowhere = jnp.asarray(np.zeros_like(masks[0]))
    return _mask(sources, masks) | jax.lax.pcast(nowhere, jax.sharding.get_abstract_mesh().manual_axes, to="varying")
