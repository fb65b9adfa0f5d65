"""Finds the inputs that a program reads in fewer bits than they have: they may travel in these.

A loss in mixed precision casts its parameters before it computes with them. Cast before or behind a gather, they are
the same numbers.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fddp.jax_internals import (
    REMATERIALISED,
    WRAPPERS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    called_program,
    loop_parts,
    scan_body,
)
from fddp.jaxpr.equations import variables


def read_in(closed: ClosedJaxpr) -> list[np.dtype | None]:
    """Finds the float dtype to which a program casts an input wherever it reads it.

    Args:
      closed: the program.

    Returns:
      For each input a dtype of fewer bits than its own; None where something reads more of it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, b: jnp.sum(jnp.tanh(w.astype(jnp.bfloat16)) + b)
      >>> read_in(jax.make_jaxpr(jax.grad(loss))(jnp.float32(1), jnp.float32(1)))
      [dtype(bfloat16), None]
    """
    found = _dtypes(closed.jaxpr)
    return [dtype if _narrower(dtype, var.aval) else None for var, dtype in zip(closed.jaxpr.invars, found)]


def _dtypes(jaxpr: Jaxpr) -> list[np.dtype | None]:
    """The one dtype in which each input of a program is read; None where there are several, or none."""
    read: dict[Any, set[Any]] = {var: set() for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for var, dtype in zip(eqn.invars, _of_inputs(eqn)):
            if not isinstance(var, Literal) and var in read:
                read[var].add(dtype)
    for var in variables(jaxpr.outvars):
        read.get(var, set()).add(None)
    return [next(iter(dtypes)) if len(dtypes) == 1 else None for dtypes in read.values()]


def _of_inputs(eqn: JaxprEqn) -> list[np.dtype | None]:
    """The dtypes in which an equation reads its inputs, None where it reads all of one."""
    if eqn.primitive.name == "convert_element_type":
        form: Any = eqn.outvars[0].aval
        return [form.dtype]
    if eqn.primitive.name in WRAPPERS | REMATERIALISED:
        return _dtypes(called_program(eqn).jaxpr)
    if eqn.primitive.name == "scan":
        constants, carry, rows = loop_parts(eqn, _dtypes(scan_body(eqn)[0].jaxpr))
        return [*constants, *(None for _ in carry), *rows]
    return [None for _ in eqn.invars]


def _narrower(dtype: Any, own: Any) -> bool:
    if dtype is None or not all(jnp.issubdtype(one, jnp.floating) for one in (dtype, own.dtype)):
        return False
    return dtype.itemsize < own.dtype.itemsize
