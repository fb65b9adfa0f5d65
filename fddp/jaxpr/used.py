"""Finds the parameters that a loss may use, or uses for sure, in its program.

Every value carries the set of leaves it came from; an equation hands on the union of its inputs' sets.

Source: DDP's `find_unused_parameters`: `prepare_for_backward` in PyTorch's `reducer.cpp`; here decided by the program.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.jax_internals import (
    CALLS,
    OWN_DERIVATIVE,
    Jaxpr,
    JaxprEqn,
    branches,
    called_program,
    is_for_platforms,
    loop_parts,
    scan_body,
    while_programs,
    without_refs,
)
from fddp.jaxpr.flow import flow
from fddp.jaxpr.leaves import differentiable

Sources = frozenset[int]
"""The leaves that a value came from, as numbers of masks. Mask i marks leaf i alone; later masks mark several."""
Choose = Callable[..., Sources]
"""Joins the sets of branches, of which a run takes one: `frozenset.union` (may use), `.intersection` (uses surely)."""
NOTHING: Sources = frozenset()
Sets = list[Sources]


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
    jaxpr = without_refs(jax.make_jaxpr(f)(leaves)).jaxpr
    loss = _flow(jaxpr, origins(leaves), frozenset.union)[0]
    return tuple(i in loss for i in range(len(leaves)))


def origins(leaves: Sequence[Any]) -> Sets:
    """Gives each leaf the set of itself alone, if it can have a gradient; else the empty set."""
    inexact = set(differentiable(leaves))
    return [frozenset({i} & inexact) for i in range(len(leaves))]


def _flow(jaxpr: Jaxpr, inputs: Sets, choose: Choose) -> Sets:
    """Finds the sets of a program's outputs from those of its inputs."""
    of = flow(jaxpr, inputs, partial(flow_through, choose=choose), of_no_leaf)
    return [of(atom) for atom in jaxpr.outvars]


def of_no_leaf(atom: Any) -> Sources:
    """The set of a literal or a constant."""
    del atom
    return NOTHING


def flow_through(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    """Finds the sets of one equation's outputs."""
    name = eqn.primitive.name
    if name == "stop_gradient":
        outputs = [NOTHING]
    elif name == "cond":
        # Branches for platforms, not for data, are chosen by XLA: all count.
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
            outputs = [sources | ignored_inputs(eqn, inputs) for sources in outputs]
    else:
        outputs = [NOTHING.union(*inputs)] * len(eqn.outvars)
    return [sources if can_have_gradient(var) else NOTHING for var, sources in zip(eqn.outvars, outputs)]


def _flow_of_scan(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    consts, carry, xs = loop_parts(eqn, inputs)
    closed, options = scan_body(eqn)
    count = len(carry)
    length = options["length"]

    def body(carry: Sets) -> Sets:
        return _flow(closed.jaxpr, [*consts, *carry, *xs], choose)

    rounds, start = _rounds(lambda carry: body(carry)[:count], carry)
    last = length if length < len(rounds) else start + (length - start) % (len(rounds) - start)
    nothing = [NOTHING] * len(closed.jaxpr.outvars[count:])
    outputs = zip(nothing, *(body(carry)[count:] for carry in rounds[:length]))
    return [*rounds[last], *(frozenset.union(*same) for same in outputs)]


def _rounds(body: Callable[[Sets], Sets], carry: Sets) -> tuple[list[Sets], int]:
    """Finds the sets of a loop's carry before each round, until they repeat; and the round that they go back to."""
    rounds = [carry]
    while (after := body(rounds[-1])) not in rounds:
        rounds.append(after)
    return rounds, rounds.index(after)


def ignored_inputs(eqn: JaxprEqn, inputs: Sets) -> Sources:
    """The leaves that an equation's inputs come from and none of its outputs does."""
    return NOTHING.union(*inputs).difference(*_flow(called_program(eqn).jaxpr, inputs, frozenset.union))


def can_have_gradient(var: Any) -> bool:
    """Whether a value can have a gradient."""
    return jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact)
