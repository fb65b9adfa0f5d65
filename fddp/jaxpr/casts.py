"""Finds inputs that a program casts to a narrower dtype at every read: they can be sent in it.

A loss in mixed precision casts its parameters before it computes with them. The numbers are the
same if the cast precedes the gather.

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
from fddp.jaxpr.equations import form_of, variables


def read_in(closed: ClosedJaxpr) -> list[np.dtype | None]:
    """Finds the narrower float dtype to which a program casts an input at every read, or None.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, b: jnp.sum(jnp.tanh(w.astype(jnp.bfloat16)) + b)
    >>> read_in(jax.make_jaxpr(jax.grad(loss))(jnp.float32(1), jnp.float32(1)))
    [dtype(bfloat16), None]
    """
    return list(map(_narrower, _dtypes(closed.jaxpr), closed.in_avals))


def _dtypes(jaxpr: Jaxpr) -> list[np.dtype | None]:
    """The dtype to which all reads of an input cast it, or None."""
    read: dict[Any, set[Any]] = {var: set() for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for var, dtype in zip(eqn.invars, _of_inputs(eqn)):
            if not isinstance(var, Literal) and var in read:
                read[var].add(dtype)
    for var in variables(jaxpr.outvars):
        read.get(var, set()).add(None)
    return [dtypes.pop() if len(dtypes) == 1 else None for dtypes in read.values()]


def _of_inputs(eqn: JaxprEqn) -> list[np.dtype | None]:
    """The dtypes to which an equation casts its inputs; None for a read without a cast."""
    if eqn.primitive.name == "convert_element_type":
        return [form_of(eqn.outvars[0]).dtype]
    if eqn.primitive.name in WRAPPERS | REMATERIALISED:
        return _dtypes(called_program(eqn).jaxpr)
    if eqn.primitive.name == "scan":
        constants, carry, layers = loop_parts(eqn, _dtypes(scan_body(eqn)[0].jaxpr))
        return [*constants, *[None] * len(carry), *layers]
    return [None] * len(eqn.invars)


def _narrower(dtype: np.dtype | None, form: Any) -> np.dtype | None:
    """Returns a dtype if it is a narrower float than that of an input, else None."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    narrower = jnp.issubdtype(form.dtype, jnp.floating) and dtype.itemsize < form.dtype.itemsize
    return dtype if narrower else None
