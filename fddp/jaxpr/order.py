"""The order in which gradients become ready and parameters are used, read off the program.

`jax.make_jaxpr(jax.value_and_grad(loss))` is a straight-line program, known before it runs. The
position of a gradient in it is the moment at which it becomes ready. DDP learns this order from
hooks in the first iteration.

Source: Li et al. (VLDB 2020), section 3.2.3; `Reducer::rebuild_buckets` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.jax_internals import ClosedJaxpr, Jaxpr, Literal, Var, inner_programs, unbound_axis
from fddp.jaxpr.dataflow import last_costly
from fddp.jaxpr.equations import cheap, form_of, straighten, variables
from fddp.jaxpr.leaves import differentiable, join_leaves, split_leaves
from fddp.wording import check_has


def ready_order(closed: ClosedJaxpr, count: int) -> tuple[int, ...]:
    """Orders the first `count` outputs of a program by the last costly equation each depends on.

    Casts delay nothing. JAX casts a gradient back when it reverses the cast of the parameter, often
    at the very end, but the gradient is ready as soon as the uncast value is. Outputs of a `scan`
    over layers are in the order of its body; outputs of another equation in reverse, DDP's guess.
    """
    jaxpr = straighten(closed).jaxpr
    # A gradient without an equation (a constant, an input) is ready before all others.
    ready = last_costly(jaxpr)
    return tuple(sorted(range(count), key=lambda k: (ready(jaxpr.outvars[k]), -k)))


def first_uses(closed: ClosedJaxpr) -> list[int]:
    """Positions of the first costly equations that read each input of a program.

    A cast of all parameters at the beginning is not a use, but the equations that read its results
    are. The position of an unused input is the number of equations.

    >>> import jax, jax.numpy as jnp
    >>> first_uses(jax.make_jaxpr(lambda a, b: jnp.sin(b) + jnp.sin(2 * a))(1.0, 1.0))
    [2, 0]
    """
    jaxpr = straighten(closed).jaxpr
    end = len(jaxpr.eqns)
    uses: dict[Var, int] = {}
    for position, eqn in reversed(list(enumerate(jaxpr.eqns))):
        use = position
        if cheap(eqn):
            use = min((uses.get(var, end) for var in eqn.outvars), default=position)
        for var in variables(eqn.invars):
            uses[var] = min(use, uses.get(var, use))
    return [uses.get(var, end) for var in jaxpr.invars]


def wiring(closed: ClosedJaxpr) -> bytes:
    """Hashes which operations make each output from which inputs.

    Numbers do not count, nor does what no output needs: a rank's number may be a constant, and one
    rank alone may print.
    """
    return _hash(*_outputs(straighten(closed).jaxpr))


def _outputs(jaxpr: Jaxpr) -> list[bytes]:
    hashes = dict[Var, bytes]()
    for k, var in enumerate(jaxpr.invars):
        hashes[var] = b"input %d" % k

    def read(atom: Var | Literal) -> bytes:
        return b"constant" if isinstance(atom, Literal) else hashes.get(atom, b"constant")

    for eqn in jaxpr.eqns:
        inner = [_hash(*_outputs(body)) for body in inner_programs(eqn)]
        digest = _hash(eqn.primitive.name.encode(), *inner, b"of", *map(read, eqn.invars))
        for k, var in enumerate(eqn.outvars):
            hashes[var] = _hash(digest, b"%d" % k, str(form_of(var)).encode())
    return list(map(read, jaxpr.outvars))


def _hash(*parts: bytes) -> bytes:
    return sha256(b"\0".join(parts)).digest()


def grad_order(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> tuple[int, ...]:
    """Finds the order in which the gradients of a loss become ready, from its program.

    Args:
      loss_fn: `loss_fn(params, *args) -> loss` or `-> (loss, aux)`.
      params: tree of arrays or `jax.ShapeDtypeStruct`s.
      *args: the other arguments of the loss, or their shapes.

    Returns:
      Indices of the leaves of `params`, first ready first. Leaves without a gradient (integers)
      are omitted.

    Raises:
      ValueError: the loss has a collective.

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
        value = loss_fn(treedef.unflatten(join_leaves(chosen, trainable, fixed)), *args)
        return value[0] if isinstance(value, tuple) else value

    trainable, fixed = split_leaves(chosen, leaves)
    try:
        closed = jax.make_jaxpr(jax.grad(loss))(trainable, fixed, *args)
    except NameError as error:
        if unbound_axis(error) is None:
            raise
        raise ValueError(
            f"grad_order: the loss has a collective ({error}), and no axis is bound here. Pass a "
            "loss without collectives, or read the order from step.plan."
        ) from None
    return tuple(chosen[k] for k in ready_order(closed, len(chosen)))
