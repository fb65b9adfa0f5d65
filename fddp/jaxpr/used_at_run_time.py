"""Finds the parameters that a loss has used, while the loss is computed.

A branch chosen at run time decides the set of leaves that its outputs depend on. From there on the
set is a mask, an array. All other sets are known from the program (see `used`), and their equations
run unchanged.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool

from fddp.jax_internals import (
    OWN_DERIVATIVE,
    REMATERIALISED,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    branches,
    called_program,
    jaxpr_as_fun,
    loop_parts,
    rematerialised,
    run_again,
    run_while,
    scan_body,
    while_programs,
    without_refs,
)
from fddp.jaxpr.interpreter import Read, interpret
from fddp.jaxpr.used import (
    NOTHING,
    Sets,
    Sources,
    can_have_gradient,
    flow_through,
    ignored_inputs,
    origins,
)

Loss = TypeVar("Loss")
Aux = TypeVar("Aux")
Masks = tuple[Bool[Array | np.ndarray, " n"], ...]
"""Masks by number: mask i marks the leaves of number i."""
Masked = tuple[list[Any], list[Array]]
"""Values, and for each a mask of the leaves that it depends on."""


def tracked(
    f: Callable[[Sequence[Array]], tuple[Loss, Aux]],
) -> Callable[[Sequence[Array]], tuple[Loss, tuple[Aux, Bool[Array, " n"]]]]:
    """Returns `f` with a mask of the used leaves: (loss, aux) becomes (loss, (aux, used)).

    A leaf is used if a path leads from it to the loss, whatever the gradient along it: a product
    with zero is a path. Integers, booleans and `stop_gradient` end a path. Only the branch taken
    counts (`vmap` takes all). A loop uses the leaves of all its rounds. A function with a custom
    derivative also uses the inputs that its value uses in no branch. Values and gradients are
    unchanged and computed once. `f` must be traceable by `jit`, with arrays in `aux`.

    >>> import jax.numpy as jnp
    >>> f = lambda w: (jax.lax.cond(w[0] > 0, lambda: w[0] * w[1], lambda: w[0] * w[2]), w[3])
    >>> loss_and_grad = jax.value_and_grad(tracked(f), has_aux=True)
    >>> (loss, (aux, used)), grads = loss_and_grad([1.0, 2.0, 3.0, 4.0])
    >>> float(loss), used.tolist()
    (2.0, [True, True, False, False])
    """

    def with_use(leaves: Sequence[Array]) -> tuple[Loss, tuple[Aux, Bool[Array, " n"]]]:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(leaves)
        masks = tuple(np.eye(len(leaves), dtype=bool))
        values, sources, masks = _evaluate(
            without_refs(closed), list(leaves), origins(leaves), masks
        )
        loss, aux = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return loss, (aux, _mask(sources[0], masks))

    return with_use


def _evaluate(
    closed: ClosedJaxpr, args: Sequence[ArrayLike], inputs: Sets, masks: Masks
) -> tuple[list[Any], Sets, Masks]:
    """Runs a program; returns its outputs, their sets, and the masks numbered in these sets."""
    jaxpr = closed.jaxpr
    sets: dict[Var, Sources] = dict(zip(jaxpr.invars, inputs))

    def sources(atom: Var | Literal) -> Sources:
        return NOTHING if isinstance(atom, Literal) else sets.get(atom, NOTHING)

    def follow(eqn: JaxprEqn, read: Read) -> list[Any] | None:
        nonlocal masks
        operand_sets = list(map(sources, eqn.invars))
        possible = flow_through(eqn, operand_sets, frozenset.union)
        certain = flow_through(eqn, operand_sets, frozenset.intersection)
        outputs = None
        if possible != certain:
            operands = list(map(read, eqn.invars))
            outputs, output_masks = _with_masks(eqn, operands, operand_sets, masks)
            # A set that depends on the branch becomes a mask with a new number.
            for k in range(len(output_masks)):
                if possible[k] != certain[k]:
                    possible[k] = frozenset({len(masks) + k})
            masks = (*masks, *output_masks)
        sets.update(zip(eqn.outvars, possible))
        return outputs

    return interpret(closed, args, follow), list(map(sources, jaxpr.outvars)), masks


def _with_masks(eqn: JaxprEqn, args: Sequence[ArrayLike], inputs: Sets, masks: Masks) -> Masked:
    """Runs an equation whose sets depend on a branch; returns its outputs and their masks."""
    name = eqn.primitive.name
    if name == "cond":
        return jax.lax.switch(
            args[0], [partial(_call, b, inputs[1:], masks) for b in branches(eqn)], *args[1:]
        )
    if name in ("scan", "while"):
        return {"scan": _scan, "while": _while}[name](eqn, args, inputs, masks)
    inner = partial(_call, called_program(eqn), inputs, masks)
    if name in REMATERIALISED:
        return rematerialised(inner, eqn)(*args)
    if name in OWN_DERIVATIVE:
        # The rule of the derivative ignores masks, so a second run computes them. XLA drops all of
        # it but the computation that the choice of a branch depends on.
        _, output_masks = inner(*map(jax.lax.stop_gradient, args))
        ignored = _mask(ignored_inputs(eqn, inputs), masks)
        return run_again(eqn, args), [mask | ignored for mask in output_masks]
    return inner(*args)


def _call(closed: ClosedJaxpr, inputs: Sets, masks: Masks, *args: ArrayLike) -> Masked:
    """Runs a program; returns its outputs and their masks."""
    values, sources, masks = _evaluate(closed, args, inputs, masks)
    return values, _varying(sources, masks)


def _scan(eqn: JaxprEqn, args: Sequence[ArrayLike], inputs: Sets, masks: Masks) -> Masked:
    consts, carry, xs = loop_parts(eqn, args)
    const_sets, initial_sets, x_sets = loop_parts(eqn, inputs)
    closed, options = scan_body(eqn)
    count = len(carry)

    def body(state: tuple[list[Any], list[Array], list[Array]], x: list[Any]) -> Any:
        carry, round_masks, y_masks = state
        carry_sets, body_masks = _named(closed.jaxpr.outvars, round_masks, masks)
        values, round_masks = _call(
            closed, [*const_sets, *carry_sets, *x_sets], body_masks, *consts, *carry, *x
        )
        # The stacked outputs are a single array, which uses the leaves of all rounds.
        y_masks = list(map(or_, y_masks, round_masks[count:]))
        return (values[:count], round_masks[:count], y_masks), values[count:]

    empty = _varying([NOTHING] * len(closed.jaxpr.outvars[count:]), masks)
    initial = carry, _varying(initial_sets, masks), empty
    (carry, carry_masks, y_masks), ys = jax.lax.scan(body, initial, xs, **options)
    return [*carry, *ys], [*carry_masks, *y_masks]


def _while(eqn: JaxprEqn, args: Sequence[ArrayLike], inputs: Sets, masks: Masks) -> Masked:
    test_consts, consts, carry = loop_parts(eqn, args)
    _, const_sets, initial_sets = loop_parts(eqn, inputs)
    test, closed = while_programs(eqn)

    def body(carry: list[Any], carry_masks: list[Array]) -> Masked:
        carry_sets, body_masks = _named(closed.jaxpr.outvars, carry_masks, masks)
        values, new_masks = _call(closed, [*const_sets, *carry_sets], body_masks, *consts, *carry)
        # Under `vmap` an element of the batch that has ended keeps its value and its leaves.
        batched = bool(test.out_avals[0].shape)  # pyright: ignore[reportAttributeAccessIssue]
        return values, list(map(or_, carry_masks, new_masks)) if batched else new_masks

    def go_on(carry: list[Any], carry_masks: list[Array]) -> Any:
        del carry_masks
        return jaxpr_as_fun(test)(*test_consts, *carry)[0]

    return run_while(eqn, go_on, body, carry, _varying(initial_sets, masks))


def _named(
    carry: Sequence[Var | Literal], carry_masks: list[Array], masks: Masks
) -> tuple[Sets, Masks]:
    """Numbers the masks of a loop's carry, and appends them to the masks."""
    carry_sets = [NOTHING] * len(carry_masks)
    for k in range(len(carry_masks)):
        if can_have_gradient(carry[k]):
            carry_sets[k] = frozenset({len(masks) + k})
    return carry_sets, (*masks, *carry_masks)


def _mask(sources: Sources, masks: Masks) -> Bool[Array, " n"]:
    """Converts a set to a mask."""
    empty = np.zeros(masks[0].shape if masks else 0, bool)
    return jnp.asarray(reduce(or_, map(masks.__getitem__, sorted(sources)), empty))


def _varying(sets: Sets, masks: Masks) -> list[Bool[Array, " n"]]:
    """Converts sets to masks of varying type in a `shard_map`, common to branches and rounds."""
    rows = list[Array]()
    for sources in sets:
        empty = jnp.asarray(np.zeros_like(masks[0]))
        axes = jax.sharding.get_abstract_mesh().manual_axes
        rows.append(_mask(sources, masks) | jax.lax.pcast(empty, axes, to="varying"))
    return rows
