"""Finds the parameters that a loss may use, or certainly uses, from its program.

Every value carries the set of leaves that it depends on; the outputs of an equation have the union
of its inputs' sets.

Source: DDP's `find_unused_parameters`: `prepare_for_backward` in PyTorch's `reducer.cpp`; decided
here by the program.
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
    Literal,
    Var,
    branches,
    called_program,
    is_for_platforms,
    loop_parts,
    scan_body,
    while_programs,
    without_refs,
)
from fddp.jaxpr.dataflow import flow
from fddp.jaxpr.leaves import differentiable

Sources = frozenset[int]
"""Leaves that a value depends on, as numbers of masks. Mask i marks leaf i, later masks several."""
Choose = Callable[..., Sources]
"""Joins the sets of branches: `frozenset.union` (may use) or `.intersection` (certainly uses)."""
NOTHING: Sources = frozenset()
Sets = list[Sources]


def statically_used(f: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Marks the leaves with a path to the loss in any branch; `f` returns the loss or (loss, aux).

    >>> loss = lambda w: jax.lax.cond(w[0] > 0, lambda: w[0], lambda: w[1])
    >>> statically_used(loss, [1.0, 2.0, 3.0])
    (True, True, False)
    """
    jaxpr = without_refs(jax.make_jaxpr(f)(leaves)).jaxpr
    loss = _flow(jaxpr, origins(leaves), frozenset.union)[0]
    return tuple(i in loss for i in range(len(leaves)))


def origins(leaves: Sequence[Any]) -> Sets:
    """The set {i} for leaf i if it can have a gradient, else the empty set."""
    inexact = set(differentiable(leaves))
    return [frozenset({i} & inexact) for i in range(len(leaves))]


def _flow(jaxpr: Jaxpr, inputs: Sets, choose: Choose) -> Sets:
    """Computes the sets of a program's outputs from those of its inputs."""
    through = partial(flow_through, choose=choose)
    return list(map(flow(jaxpr, inputs, through, lambda atom: NOTHING), jaxpr.outvars))


def flow_through(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    """Computes the sets of an equation's outputs from those of its inputs."""
    name = eqn.primitive.name
    if name == "stop_gradient":
        outputs = [NOTHING]
    elif name == "cond":
        # XLA chooses between branches for platforms: all count.
        choose = frozenset.union if is_for_platforms(eqn) else choose
        outputs = list(map(choose, *(_flow(b.jaxpr, inputs[1:], choose) for b in branches(eqn))))
    elif name == "scan":
        outputs = _flow_of_scan(eqn, inputs, choose)
    elif name == "while":
        consts, carry = loop_parts(eqn, inputs)[1:]
        body = while_programs(eqn)[1].jaxpr
        rounds, _ = _rounds(lambda carry: _flow(body, [*consts, *carry], choose), carry)
        outputs = list(map(choose, *rounds))  # any round may be the last
    elif name in CALLS and len(called_program(eqn).jaxpr.invars) == len(inputs):
        outputs = _flow(called_program(eqn).jaxpr, inputs, choose)
        if name in OWN_DERIVATIVE:
            outputs = list(map(ignored_inputs(eqn, inputs).union, outputs))
    else:
        outputs = [NOTHING.union(*inputs)] * len(eqn.outvars)
    return [
        sources if can_have_gradient(var) else NOTHING for var, sources in zip(eqn.outvars, outputs)
    ]


def _flow_of_scan(eqn: JaxprEqn, inputs: Sets, choose: Choose) -> Sets:
    consts, carry, xs = loop_parts(eqn, inputs)
    closed, options = scan_body(eqn)
    count = len(carry)
    length = options["length"]

    def body(carry: Sets) -> Sets:
        return _flow(closed.jaxpr, [*consts, *carry, *xs], choose)

    rounds, start = _rounds(lambda carry: body(carry)[:count], carry)
    last = length if length < len(rounds) else start + (length - start) % (len(rounds) - start)
    outputs = [NOTHING] * len(closed.jaxpr.outvars[count:])
    for carry in rounds[:length]:
        outputs = list(map(frozenset.union, outputs, body(carry)[count:]))
    return [*rounds[last], *outputs]


def _rounds(body: Callable[[Sets], Sets], carry: Sets) -> tuple[list[Sets], int]:
    """Computes the sets of a loop's carry before each round, until they repeat."""
    rounds = [carry]
    while (after := body(rounds[-1])) not in rounds:
        rounds.append(after)
    return rounds, rounds.index(after)


def ignored_inputs(eqn: JaxprEqn, inputs: Sets) -> Sources:
    """The leaves that an equation's inputs depend on, but none of its outputs."""
    return NOTHING.union(*inputs).difference(
        *_flow(called_program(eqn).jaxpr, inputs, frozenset.union)
    )


def can_have_gradient(var: Var | Literal) -> bool:
    """Returns True if a value is of float or complex dtype."""
    return jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact)
