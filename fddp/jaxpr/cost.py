"""Estimates the cost of an equation, precisely enough to balance work between replicas."""

from math import prod

from fddp.jax_internals import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    branches,
    contracted_dims,
    inner_programs,
    scan_body,
)

# Decompositions: each costs about as many operations as a product of the matrix with itself.
FACTORS = {
    *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd"),
    "triangular_solve",
}


def operations(eqn: JaxprEqn) -> int:
    """Counts the operations of an equation, roughly.

    A product has its multiplications and additions; other equations have an operation per element
    of the result. A scan counts all its rounds, a conditional its costliest branch.
    """
    name = eqn.primitive.name
    elements = sum(prod(_shape(var)) for var in eqn.outvars)
    if name == "dot_general":
        return 2 * elements * prod(_shape(eqn.invars[0])[dim] for dim in contracted_dims(eqn))
    if name == "scan":
        body, settings = scan_body(eqn)
        return settings["length"] * _all(body.jaxpr)
    if name == "cond":
        return max(_all(branch.jaxpr) for branch in branches(eqn))
    inner = sum(map(_all, inner_programs(eqn)))
    if name in FACTORS:
        return elements * min(_shape(eqn.invars[0])[-2:], default=1)
    return inner or elements


def _shape(atom: Var | Literal) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _all(program: Jaxpr) -> int:
    return sum(map(operations, program.eqns))
