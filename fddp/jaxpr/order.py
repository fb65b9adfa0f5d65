"""The order in which gradients become ready and parameters are used, read off the program.

`jax.make_jaxpr(jax.value_and_grad(loss))` is a straight program, known before it runs. A gradient's place in it is the
moment at which it becomes ready. DDP learns this order from hooks in the first iteration; here the program tells it.

Source: Li et al. (VLDB 2020), section 3.2.3; `Reducer::rebuild_buckets` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable, Sequence
from itertools import count as count_up
from typing import Any

import jax

from fddp.jax_internals import ClosedJaxpr, JaxprEqn, Literal, Var
from fddp.jaxpr.equations import cheap, straighten
from fddp.jaxpr.flow import flow
from fddp.jaxpr.leaves import differentiable, merge, split
from fddp.wording import check_has


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
    check_has("__call__", "grad_order: loss_fn", loss_fn, "a function")
    leaves, treedef = jax.tree.flatten(params)
    chosen = differentiable(leaves)

    def loss(trainable: Sequence[Any], fixed: Sequence[Any], *args: Any) -> Any:
        value = loss_fn(treedef.unflatten(merge(chosen, trainable, fixed)), *args)
        return value[0] if isinstance(value, tuple) else value

    trainable, fixed = split(chosen, leaves)
    closed = jax.make_jaxpr(jax.grad(loss))(trainable, fixed, *args)
    return tuple(chosen[k] for k in ready_order(closed, len(chosen)))


def ready_order(closed: ClosedJaxpr, count: int) -> tuple[int, ...]:
    """Orders the first outputs of a program by the place of the last costly equation that makes them.

    JAX casts a gradient back to its parameter's dtype where it reverses the parameter's own cast, often at the very
    end. The cast delays nothing: the gradient is ready when the value that is cast is ready.

    Args:
      closed: the program.
      count: number of outputs to order.

    Returns:
      Their numbers. Outputs of one equation (a `scan` over layers gives all at once) are in reverse order, DDP's guess.
    """
    jaxpr = straighten(closed).jaxpr
    numbers = count_up()

    def made(eqn: JaxprEqn, places: list[int]) -> list[int]:
        at = next(numbers)
        return [max(places, default=-1) if cheap(eqn) else at] * len(eqn.outvars)

    # A gradient that no equation makes (a constant, an input) is ready before the first.
    place = flow(jaxpr, [-1] * len(jaxpr.invars), made, lambda atom: -1)
    return tuple(sorted(range(count), key=lambda k: (place(jaxpr.outvars[k]), -k)))


def first_uses(closed: ClosedJaxpr) -> list[int]:
    """Finds the first costly equation that reads each input of a program.

    A cast of all parameters at the beginning is not a use: the equations that read the cast parameters are.

    Args:
      closed: the program.

    Returns:
      For each input the number of that equation, or the count of all equations where there is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> first_uses(jax.make_jaxpr(lambda a, b: jnp.sin(b) + jnp.sin(2 * a))(1.0, 1.0))
      [2, 0]
    """
    jaxpr = straighten(closed).jaxpr
    uses: dict[Var, int] = {}
    for at, eqn in reversed(list(enumerate(jaxpr.eqns))):
        used = min((uses.get(var, len(jaxpr.eqns)) for var in eqn.outvars), default=at) if cheap(eqn) else at
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                uses[atom] = min(used, uses.get(atom, used))
    return [uses.get(var, len(jaxpr.eqns)) for var in jaxpr.invars]
