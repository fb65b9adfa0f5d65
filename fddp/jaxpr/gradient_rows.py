"""Counts the table rows of a gradient that can be nonzero: an embedding's has a row per lookup.

Every value carries a count of rows, along its first dim. Zeros have none, a scatter into zeros has
a row for each index, and a sum has the rows of both summands.

Source: Kim et al., "Parallax" (EuroSys 2019), which separates sparse from dense variables by the
type of their gradients.
"""

import sys

import numpy as np

from fddp.jax_internals import CALLS, ClosedJaxpr, JaxprEqn, Literal, Var, scattered_rows
from fddp.jaxpr.dataflow import flow
from fddp.jaxpr.equations import straighten

# A row of the result is zero if the row of the first input is zero.
OF_FIRST = {"neg", "convert_element_type", "copy", "div", "real", "reduce_precision"}
# A row of the result is zero if the rows of all inputs are zero.
OF_ANY = {"add", "add_any", "sub", "dynamic_update_slice", "pad"}
EVERY = sys.maxsize  # the count of a nonzero scalar: broadcast, it fills all rows
Counts = list[int]


def touched_rows(closed: ClosedJaxpr) -> Counts:
    """Counts the rows of a program's outputs that can be nonzero, at most all their rows.

    It assumes that no number is infinite. A lookup inside a loop or a branch counts as all
    rows.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda table, ids: jnp.sum(jnp.tanh(table[ids]))
    >>> touched_rows(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1000, 8)), jnp.zeros(64, int)))
    [64]
    """
    program = straighten(closed, CALLS).jaxpr
    rows = flow(program, list(map(_rows, program.invars)), _through, _of_source)
    return list(map(rows, program.outvars))


def _of_source(atom: Var | Literal) -> int:
    """The count of a literal or a constant; a constant has all rows."""
    return 0 if isinstance(atom, Literal) and not np.any(atom.val) else _rows(atom)


def _through(eqn: JaxprEqn, inputs: Counts) -> Counts:
    """Computes the counts of an equation's outputs, at most all their rows."""
    name = eqn.primitive.name
    every = list(map(_rows, eqn.outvars))
    keeps_rows = name == "reshape" and [_rows(eqn.invars[0])] == every
    if name in OF_FIRST or keeps_rows or (name == "broadcast_in_dim" and inputs[0] == 0):
        count = inputs[0]
    elif name in OF_ANY:
        count = sum(inputs[:2])
    elif name == "mul":
        count = min(inputs)
    elif name == "select_n":
        count = sum(inputs[1:])
    elif name == "scatter-add":
        count = inputs[0] + scattered_rows(eqn)
    else:
        return every
    return [min(count, *every)]


def _rows(atom: Var | Literal) -> int:
    """Number of all rows of a value."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else EVERY
