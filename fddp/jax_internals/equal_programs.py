"""Recognizes equal programs by their equations, before they are traced again or lowered."""

from collections.abc import Hashable
from typing import Any

import numpy as np

from fddp.jax_internals.jaxprs import ClosedJaxpr, Literal, Var


def form_of_program(closed: ClosedJaxpr) -> Hashable:
    """Makes a hashable form of a program; programs of equal forms compute the same in the same way.

    Inner programs are equal only if they are the same object, as the body of a loop is in each part
    of the loop. A program with an unhashable parameter equals only itself. The program must live as
    long as its form is used. Relies on the parameters and on `ctx` of equations: JAX has a single
    `ctx` per setting.

    >>> import jax
    >>> twice, thrice = (jax.make_jaxpr(lambda x, by=by: by * x)(1.0) for by in (2.0, 3.0))
    >>> form_of_program(twice) == form_of_program(jax.make_jaxpr(lambda y: 2.0 * y)(1.0))
    True
    >>> form_of_program(twice) == form_of_program(thrice)
    False
    """
    jaxpr = closed.jaxpr
    numbers = {var: number for number, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def atom_form(atom: Var | Literal) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, _bits(atom.val)
        return numbers[atom]

    equations = list[Hashable]()
    for eqn in jaxpr.eqns:
        inputs = tuple(map(atom_form, eqn.invars))
        params = tuple((name, _bits(value)) for name, value in sorted(eqn.params.items()))
        numbers.update((var, len(numbers) + k) for k, var in enumerate(eqn.outvars))
        equations.append(
            (eqn.primitive, inputs, params, tuple(var.aval for var in eqn.outvars), eqn.ctx)
        )
    form = (
        tuple(map(id, closed.consts)),
        tuple(var.aval for var in (*jaxpr.constvars, *jaxpr.invars)),
        tuple(equations),
        tuple(map(atom_form, jaxpr.outvars)),
    )
    try:
        hash(form)
    except TypeError:
        return id(closed)
    return form


def _bits(value: Any) -> Any:
    """Returns the value with its type, and numbers as bits, so that 0 ≠ −0 and 1 ≠ True."""
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        array = np.asarray(value)
        return type(value), array.dtype, array.shape, array.tobytes()
    if isinstance(value, tuple):
        return type(value), tuple(map(_bits, value))
    return type(value), value
