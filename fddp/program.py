"""The backward pass as a list of equations, known before it runs.

`jax.make_jaxpr(jax.value_and_grad(loss))` is a straight program. The place of a gradient in it is the moment it
becomes ready: what DDP learns from hooks in the first iteration is read off here.

Source: Li et al. (VLDB 2020), section 3.2.3; `Reducer::rebuild_buckets` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fddp.jax_internals import (
    COLLECTIVES,
    OWN_DERIVATIVE,
    WRAPPERS,
    called_program,
    inner_programs,
    make_program,
    new_variable,
)

# Equations that XLA repeats rather than store their result, when it fuses them into what reads it.
CHEAP = {
    *("add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "square", "integer_pow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "clamp", "stop_gradient"),
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "iota", "copy", "transpose"),
}


def grad_order(loss_fn: Callable[..., Any], params: Any, *args: Any) -> tuple[int, ...]:
    """Finds the order in which the gradients of a loss become ready, from its program.

    Args:
      loss_fn: `loss_fn(params, *args) -> loss` or `-> (loss, aux)`.
      params: tree of arrays or `jax.ShapeDtypeStruct`s.
      *args: the loss's other arguments, or their shapes.

    Returns:
      Indices of the leaves of `params`, first ready first. Leaves without a gradient (integers) are not named.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["first"]) @ p["second"])
      >>> params = {"first": jnp.ones((3, 3)), "second": jnp.ones((3, 3))}
      >>> grad_order(loss, params, jnp.ones((2, 3)))
      (1, 0)
    """
    leaves, treedef = jax.tree.flatten(params)
    chosen = differentiable(leaves)

    def loss(trainable: Sequence[Any], fixed: Sequence[Any], *args: Any) -> Any:
        value = loss_fn(treedef.unflatten(merge(chosen, trainable, fixed)), *args)
        return value[0] if isinstance(value, tuple) else value

    trainable, fixed = split(chosen, leaves)
    closed = jax.make_jaxpr(jax.grad(loss))(trainable, fixed, *args)
    return tuple(chosen[k] for k in ready_order(closed, len(chosen)))


def ready_order(closed: ClosedJaxpr, count: int) -> tuple[int, ...]:
    """Orders the first outputs of a program by the place of the last equation that costs something to make them.

    JAX puts the cast that brings a gradient back to its parameter's dtype where the parameter's own cast was reversed:
    often at the very end. It delays nothing: the gradient is ready when what is cast is.

    Args:
      closed: the program.
      count: how many of its outputs to order.

    Returns:
      Their numbers; what one equation makes (a `scan` over layers delivers all at once) in reverse, as DDP guesses.
    """
    jaxpr = straighten(closed).jaxpr
    places: dict[Var, int] = {}

    def place(atom: Any) -> int:
        # A gradient that no equation makes (a constant, an input) is ready before the first.
        return -1 if isinstance(atom, Literal) else places.get(atom, -1)

    for at, eqn in enumerate(jaxpr.eqns):
        made = max(map(place, eqn.invars), default=-1) if cheap(eqn) else at
        places.update(dict.fromkeys(eqn.outvars, made))
    return tuple(sorted(range(count), key=lambda k: (place(jaxpr.outvars[k]), -k)))


def straighten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Writes the contents of nested `jit`s in their places, so that the program is one list of equations.

    Args:
      closed: any program.

    Returns:
      An equal program without nested `jit`s. Loops, branches and rematerialised parts stay single equations.
    """
    eqns: list[JaxprEqn] = []
    consts: dict[Var, Any] = {}

    def write(inner: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        # Every name is made anew: JAX shares the body of a function that is called twice.
        names: dict[Var, Any] = dict(zip(inner.jaxpr.invars, args))
        for var, value in zip(inner.jaxpr.constvars, inner.consts):
            names[var] = new_variable(var)
            consts[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in inner.jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in WRAPPERS:
                outputs = write(called_program(eqn), inputs)
            else:
                outputs = [new_variable(var) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=inputs, outvars=outputs))
            names.update(zip(eqn.outvars, outputs))
        return [read(atom) for atom in inner.jaxpr.outvars]

    outputs = write(closed, closed.jaxpr.invars)
    return make_program(closed, eqns, closed.jaxpr.invars, outputs, consts)


def collectives(closed: ClosedJaxpr) -> set[str]:
    """Names of the collectives in a program, at any depth: sums and exchanges over a mesh axis, or MPI's."""
    return _collectives(closed.jaxpr)


def cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation works element by element, without sums or transcendental functions.

    Args:
      eqn: an equation.

    Returns:
      Whether XLA fuses it into its neighbours, as good as free.
    """
    if eqn.primitive.name in WRAPPERS | OWN_DERIVATIVE:
        return all(cheap(inner) for body in inner_programs(eqn) for inner in body.eqns)
    return eqn.primitive.name in CHEAP


def refuse_tracers(tree: Any) -> None:
    """Says that a step cannot be part of another program."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "fddp's steps are compiled programs of their own and cannot be called under jax.jit, grad or vmap; "
            "call them from Python, or use fddp.all_reduce inside your own jax.shard_map."
        )


def differentiable(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Which leaves can have a gradient: those of float or complex dtype."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in leaves]
    return tuple(i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact))


def split(chosen: Sequence[int], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Parts the leaves into the chosen ones and the rest."""
    inside = set(chosen)
    return [leaves[i] for i in chosen], [x for i, x in enumerate(leaves) if i not in inside]


def merge(chosen: Sequence[int], trainable: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """Puts the leaves back in their places: the inverse of `split`."""
    inside, rest = dict(zip(chosen, trainable)), iter(fixed)
    return [inside[i] if i in inside else next(rest) for i in range(len(trainable) + len(fixed))]


def _collectives(jaxpr: Jaxpr) -> set[str]:
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES or name.endswith("_mpi"):
            found.add(name)
        found = found.union(*(_collectives(inner) for inner in inner_programs(eqn)))
    return found
