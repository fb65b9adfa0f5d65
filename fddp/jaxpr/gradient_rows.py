"""Counts the table rows of a gradient that can be nonzero: an embedding's has a row per lookup.

Every value carries a count of rows, along its first dim. Zeros have none, a scatter into zeros has
a row for each index, and a sum has the rows of both summands.

Source: Kim et al., "Parallax" (EuroSys 2019), which separates sparse from dense variables by the
type of their gradients.
"""

import sys

import numpy as np

from fddp.jax_internals import (
    CALLS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    branches,
    called_program,
    loop_parts,
    scan_body,
    scattered_rows,
)
from fddp.jaxpr.flow import flow

# A row of the result is zero if the row of the first input is zero.
OF_FIRST = {"neg", "convert_element_type", "copy", "div", "real", "reduce_precision"}
# A row of the result is zero if the rows of all inputs are zero.
OF_ANY = {"add", "add_any", "sub", "dynamic_update_slice", "pad"}
# A row of the result is zero if the row of any input is zero.
OF_ALL = {"mul"}
EVERY = sys.maxsize  # the count of a nonzero scalar: broadcast, it fills all rows
Counts = list[int]


def touched_rows(closed: ClosedJaxpr) -> Counts:
    """Counts the rows of a program's outputs that can be nonzero, at most all their rows.

    It assumes that a loop touches as many rows in each round as in its first, and that no number is
    infinite.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda table, ids: jnp.sum(jnp.tanh(table[ids]))
    >>> touched_rows(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1000, 8)), jnp.zeros(64, int)))
    [64]
    """
    return _flow(closed.jaxpr, list(map(_rows, closed.jaxpr.invars)))


def _flow(jaxpr: Jaxpr, inputs: Counts) -> Counts:
    """Computes the counts of a program's outputs from those of its inputs."""
    return list(map(flow(jaxpr, inputs, _through, _of_source), jaxpr.outvars))


def _of_source(atom: Var | Literal) -> int:
    """The count of a literal or a constant; a constant has all rows."""
    if isinstance(atom, Literal):
        return EVERY if np.any(atom.val) else 0
    return _rows(atom)


def _through(eqn: JaxprEqn, inputs: Counts) -> Counts:
    """Computes the counts of an equation's outputs, at most all their rows."""
    return list(map(min, _made(eqn, inputs), map(_rows, eqn.outvars)))


def _made(eqn: JaxprEqn, inputs: Counts) -> Counts:
    name = eqn.primitive.name
    if name in OF_FIRST:
        return inputs[:1]
    if name in OF_ANY:
        return [sum(inputs[:2])]
    if name in OF_ALL:
        return [min(inputs)]
    if name == "select_n":
        return [sum(inputs[1:])]
    if name == "scatter-add":
        return [inputs[0] + scattered_rows(eqn)]
    if name in CALLS and len(called_program(eqn).jaxpr.invars) == len(inputs):
        return _flow(called_program(eqn).jaxpr, inputs)
    if name == "cond":
        by_branch = [_flow(branch.jaxpr, inputs[1:]) for branch in branches(eqn)]
        return list(map(max, zip(*by_branch)))
    if name == "scan":
        return _through_scan(eqn, inputs)
    keeps_rows = name == "reshape" and _rows(eqn.invars[0]) == _rows(eqn.outvars[0])
    zero = name == "broadcast_in_dim" and inputs[0] == 0
    return inputs[:1] if keeps_rows or zero else list(map(_rows, eqn.outvars))


def _through_scan(eqn: JaxprEqn, inputs: Counts) -> Counts:
    closed, options = scan_body(eqn)
    consts, carry, xs = loop_parts(eqn, inputs)
    layers = closed.jaxpr.invars[len(consts) + len(carry) :]
    layer_counts = [_rows(var) if count else 0 for count, var in zip(xs, layers)]
    outputs = _flow(closed.jaxpr, [*consts, *carry, *layer_counts])
    for k, after in enumerate(outputs):
        if k >= len(carry):
            outputs[k] = EVERY if after else 0
        elif after > carry[k]:  # a count that shrinks is assumed not to grow again
            outputs[k] = carry[k] + options["length"] * (after - carry[k])
    return outputs


def _rows(atom: Var | Literal) -> int:
    """Number of all rows of a value."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else EVERY
