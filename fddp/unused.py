"""Which parameters a loss truly used, found while it is computed.

Every value carries the set of leaves it came from; an equation hands on the union of its inputs' sets. Where a branch
is chosen at run time the set is chosen with it: from there on it is an array. All else is known from the program, and
those equations run unchanged.

Source: DDP's `find_unused_parameters`: `prepare_for_backward` in PyTorch's `reducer.cpp`; here decided by the program.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, Bool

from fddp.jax_internals import (
    CALLS,
    OWN_DERIVATIVE,
    REMATERIALISED,
    branches,
    called_program,
    is_for_platforms,
    loop_parts,
    make_program,
    rematerialised,
    run_again,
    scan_body,
    while_programs,
)
from fddp.program import differentiable

Loss = TypeVar("Loss")
Aux = TypeVar("Aux")

Sources = frozenset[int]
"""Where a value came from: numbers of masks. The first n are those of the leaves, each of itself."""
Masks = tuple[Bool[Array | np.ndarray, " n"], ...]
"""The leaves that each number stands for."""
Masked = tuple[list[Any], list[Array]]
"""Values, and which leaves each came from."""
Choose = Callable[..., Sources]
"""What counts where the program does not decide: `frozenset.union` (may use) or `.intersection` (uses for sure)."""
NOTHING: Sources = frozenset()
Sets = list[Sources]


def tracked(
    f: Callable[[Sequence[Array]], tuple[Loss, Aux]],
) -> Callable[[Sequence[Array]], tuple[Loss, tuple[Aux, Bool[Array, " n"]]]]:
    """Makes a loss also tell which leaves it used.

    A leaf is used if a path leads from it to the loss, whatever the gradient along it: a product with zero is a path.
    Integers, booleans and `stop_gradient` end a path. Of branches only the one taken counts (`vmap` takes all); in a
    loop, what any round used. What has a derivative of its own also uses the inputs that its value ignores.

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
        values, sources, masks = _evaluate(closed, list(leaves), _origins(leaves), masks)
        loss, aux = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return loss, (aux, _mask(sources[0], masks))

    return with_use


def statically_used(f: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Finds the leaves that a loss may use, whichever branches it takes.

    Args:
      f: `f(leaves) -> loss` or `-> (loss, aux)`.
      leaves: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      For each leaf whether any path leads from it to the loss.

    Example:
      >>> statically_used(lambda w: jax.lax.cond(w[0] > 0, lambda: w[0], lambda: w[1]), [1.0, 2.0, 3.0])
      (True, True, False)
    """
    jaxpr = jax.make_jaxpr(f)(leaves).jaxpr
    loss = _flow(jaxpr, _origins(leaves), frozenset.union)[0]
    return tuple(i in loss for i in range(len(leaves)))


def _origins(leaves: Sequence[Any]) -> Sets:
    """Each leaf comes from itself, if it can have a gradient."""
    inexact = set(differentiable(leaves))
    return [frozenset({i} & inexact) for i in range(len(leaves))]


### What the program decides


def _flow(jaxpr: Jaxpr, inputs: Sets, choose: Choose) -> Sets:
    """The sets of a program's outputs, from those of its inputs."""
    env: dict[Any, Sources] = dict(zip(jaxpr.invars, inputs))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _handed_on(eqn, _read(env, eqn.invars), choose)))
    return _read(env, jaxpr.outvars)


def _read(env: dict[Any, Sources], atoms: Sequence[Any]) -> Sets:
    # Literals and constants come from no leaf.
    return [NOTHING if isinstance(atom, Literal) else env.get(atom, NOTHING) for atom in atoms]


def _handed_on(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    """The sets of one equation's outputs."""
    name = eqn.primitive.name
    if name == "stop_gradient":
        outputs = [NOTHING]
    elif name == "cond":
        # Branches for platforms, not for data, are XLA's to choose: all count.
        choose = frozenset.union if is_for_platforms(eqn) else choose
        outputs = [choose(*same) for same in zip(*(_flow(b.jaxpr, inputs[1:], choose) for b in branches(eqn)))]
    elif name == "scan":
        outputs = _flow_of_scan(eqn, inputs, choose)
    elif name == "while":
        consts, carry = loop_parts(eqn, inputs)[1:]
        rounds, _ = _rounds(lambda carry: _flow(while_programs(eqn)[1].jaxpr, [*consts, *carry], choose), carry)
        outputs = [choose(*same) for same in zip(*rounds)]  # any number of rounds may be the last
    elif name in CALLS and len(called_program(eqn).jaxpr.invars) == len(inputs):
        outputs = _flow(called_program(eqn).jaxpr, inputs, choose)
        if name in OWN_DERIVATIVE:
            outputs = [sources | _ignored(eqn, inputs) for sources in outputs]
    else:
        outputs = [NOTHING.union(*inputs)] * len(eqn.outvars)
    return [sources if _inexact(var) else NOTHING for var, sources in zip(eqn.outvars, outputs)]


def _flow_of_scan(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    consts, carry, xs = loop_parts(eqn, inputs)
    closed, options = scan_body(eqn)
    count, length = len(carry), options["length"]

    def body(carry: Sets) -> Sets:
        return _flow(closed.jaxpr, [*consts, *carry, *xs], choose)

    rounds, start = _rounds(lambda carry: body(carry)[:count], carry)
    last = length if length < len(rounds) else start + (length - start) % (len(rounds) - start)
    nothing = [NOTHING] * len(closed.jaxpr.outvars[count:])
    outputs = zip(nothing, *(body(carry)[count:] for carry in rounds[:length]))
    return [*rounds[last], *(frozenset.union(*same) for same in outputs)]


def _rounds(body: Callable[[Sets], Sets], carry: Sets) -> tuple[list[Sets], int]:
    """The sets of a loop's carry before each round, until they repeat; and the round that they go back to."""
    rounds = [carry]
    while (after := body(rounds[-1])) not in rounds:
        rounds.append(after)
    return rounds, rounds.index(after)


def _ignored(eqn: JaxprEqn, inputs: Sets) -> Sources:
    """What an equation is given but no output comes from."""
    return NOTHING.union(*inputs).difference(*_flow(called_program(eqn).jaxpr, inputs, frozenset.union))


### What is decided at run time


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], inputs: Sets, masks: Masks) -> tuple[list[Any], Sets, Masks]:
    """Runs a program; gives its outputs, their sets, and the masks that these name."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {**dict(zip(jaxpr.constvars, closed.consts)), **dict(zip(jaxpr.invars, args))}
    env: dict[Any, Sources] = dict(zip(jaxpr.invars, inputs))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        given, came_from = [value(atom) for atom in eqn.invars], _read(env, eqn.invars)
        possible = _handed_on(eqn, came_from, frozenset.union)
        certain = _handed_on(eqn, came_from, frozenset.intersection)
        if possible == certain:
            made = _run(closed, eqn, given)
        else:
            made, rows = _with_masks(eqn, given, came_from, masks)
            # What the run decides is a mask with a number of its own.
            named = (frozenset({len(masks) + k}) for k in range(len(rows)))
            possible = [a if a == b else name for a, b, name in zip(possible, certain, named)]
            masks = (*masks, *rows)
        values.update(zip(eqn.outvars, made))
        env.update(zip(eqn.outvars, possible))
    return [value(atom) for atom in jaxpr.outvars], _read(env, jaxpr.outvars), masks


def _run(closed: ClosedJaxpr, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Runs one equation as it is, under its own name and place in the source."""
    inputs: dict[Var, Any] = {v: x for v, x in zip(eqn.invars, args) if not isinstance(v, Literal)}
    return jaxpr_as_fun(make_program(closed, [eqn], list(inputs), eqn.outvars))(*inputs.values())


def _with_masks(eqn: JaxprEqn, args: Sequence[Any], inputs: Sets, masks: Masks) -> Masked:
    """Runs an equation that decides about use; gives its outputs and their masks."""
    name = eqn.primitive.name
    if name == "cond":
        return jax.lax.switch(args[0], [partial(_call, b, inputs[1:], masks) for b in branches(eqn)], *args[1:])
    if name in ("scan", "while"):
        return {"scan": _scan, "while": _while}[name](eqn, args, inputs, masks)
    inner = partial(_call, called_program(eqn), inputs, masks)
    if name in REMATERIALISED:
        return rematerialised(inner, eqn)(*args)
    if name in OWN_DERIVATIVE:
        # The rule knows nothing of masks, so they are found beside it. That repeats its forward part as far as the
        # choice of a branch depends on it; the rest nobody reads, and XLA drops it.
        _, rows = inner(*(jax.lax.stop_gradient(x) for x in args))
        ignored = _mask(_ignored(eqn, inputs), masks)
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
        # The outputs of all rounds are one array: it used what any round did.
        ever = [a | b for a, b in zip(ever, rows[count:])]
        return (values[:count], rows[:count], ever), values[count:]

    none = [_row(NOTHING, masks) for _ in closed.jaxpr.outvars[count:]]
    (carry, rows, ever), ys = jax.lax.scan(body, (carry, [_row(s, masks) for s in of_carry], none), xs, **options)
    return [*carry, *ys], [*rows, *ever]


def _while(eqn: JaxprEqn, args: Sequence[Any], inputs: Sets, masks: Masks) -> Masked:
    of_test, consts, carry = loop_parts(eqn, args)
    _, of_consts, of_carry = loop_parts(eqn, inputs)
    test, closed = while_programs(eqn)

    def body(state: Masked) -> Masked:
        carry, rows = state
        names, inside = _named(closed.jaxpr.outvars, rows, masks)
        return _call(closed, [*of_consts, *names], inside, *consts, *carry)

    start = (carry, [_row(s, masks) for s in of_carry])
    return jax.lax.while_loop(lambda state: jaxpr_as_fun(test)(*of_test, *state[0])[0], body, start)


def _named(carry: Sequence[Any], rows: list[Array], masks: Masks) -> tuple[Sets, Masks]:
    """Names for the masks of a loop's carry, and all masks that its body knows."""
    names = [frozenset({len(masks) + k}) if _inexact(carry[k]) else NOTHING for k in range(len(rows))]
    return names, (*masks, *rows)


def _mask(sources: Sources, masks: Masks) -> Bool[Array, " n"]:
    """A set as a mask."""
    none = np.zeros(masks[0].shape if masks else 0, bool)
    return jnp.asarray(reduce(or_, (masks[i] for i in sorted(sources)), none))


def _row(sources: Sources, masks: Masks) -> Bool[Array, " n"]:
    """A set as a mask that each replica of a `shard_map` has for itself: branches and rounds must agree on that."""
    nowhere = jnp.asarray(np.zeros_like(masks[0]))
    return _mask(sources, masks) | jax.lax.pcast(nowhere, jax.sharding.get_abstract_mesh().manual_axes, to="varying")


def _inexact(var: Any) -> bool:
    """Whether a value can have a gradient."""
    return jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact)
