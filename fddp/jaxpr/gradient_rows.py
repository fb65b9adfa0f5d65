"""Counts the rows of a program's results that can be other than zero: an embedding's gradient has one for each lookup.

Every value carries a count of rows, along its first dim. Zeros have none, a scatter into them has one row for each
index, and a sum has the rows of both.

Source: Kim et al., "Parallax" (EuroSys 2019), which tells sparse variables from dense ones by their gradients' type.
"""

import sys
from typing import Any

import numpy as np

from fddp.jax_internals import (
    CALLS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    branches,
    called_program,
    loop_parts,
    scan_body,
    scattered_rows,
)
from fddp.jaxpr.flow import flow

# The result has a row where the first input has one.
OF_FIRST = {"neg", "convert_element_type", "copy", "div", "real", "reduce_precision", "pad"}
# The result has a row where any input has one.
OF_ANY = {"add", "add_any", "sub", "dynamic_update_slice"}
# The result has a row where all inputs have one.
OF_ALL = {"mul"}
EVERY = sys.maxsize  # the count of a scalar that can be other than zero: broadcast, it fills all rows
Counts = list[int]


def touched_rows(closed: ClosedJaxpr) -> Counts:
    """Counts the rows of a program's outputs that can be other than zero, as far as the program tells.

    It assumes that a loop touches as many rows in each round as in its first, and that no number is infinite.

    Args:
      closed: the program.

    Returns:
      For each output a count, at most that of all its rows.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda table, ids: jnp.sum(jnp.tanh(table[ids]))
      >>> touched_rows(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1000, 8)), jnp.zeros(64, int)))
      [64]
    """
    return _flow(closed.jaxpr, [_rows(var) for var in closed.jaxpr.invars])


def _flow(jaxpr: Jaxpr, inputs: Counts) -> Counts:
    """Finds the counts of a program's outputs from those of its inputs."""
    of = flow(jaxpr, inputs, _through, _of_source)
    return [of(atom) for atom in jaxpr.outvars]


def _of_source(atom: Any) -> int:
    """The count of a literal or a constant; a constant has all rows."""
    if isinstance(atom, Literal):
        return EVERY if np.any(atom.val) else 0
    return _rows(atom)


def _through(eqn: JaxprEqn, inputs: Counts) -> Counts:
    """Finds the counts of one equation's outputs: no more than all their rows."""
    return [min(count, _rows(var)) for count, var in zip(_made(eqn, inputs), eqn.outvars)]


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
        return [max(same) for same in zip(*(_flow(branch.jaxpr, inputs[1:]) for branch in branches(eqn)))]
    if name == "scan":
        return _through_scan(eqn, inputs)
    kept = name == "reshape" and _rows(eqn.invars[0]) == _rows(eqn.outvars[0])
    zero = name == "broadcast_in_dim" and inputs[0] == 0
    return inputs[:1] if kept or zero else [_rows(var) for var in eqn.outvars]


def _through_scan(eqn: JaxprEqn, inputs: Counts) -> Counts:
    closed, options = scan_body(eqn)
    consts, carry, xs = loop_parts(eqn, inputs)
    rows = closed.jaxpr.invars[len(consts) + len(carry) :]
    slices = [0 if count == 0 else _rows(var) for count, var in zip(xs, rows)]
    after = _flow(closed.jaxpr, [*consts, *carry, *slices])
    # A count that shrinks in the first round is taken not to grow again.
    carried = [now if now <= was else was + options["length"] * (now - was) for was, now in zip(carry, after)]
    return [*carried, *(0 if count == 0 else EVERY for count in after[len(carry) :])]


def _rows(atom: Any) -> int:
    """The number of all rows of a value."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else EVERY
