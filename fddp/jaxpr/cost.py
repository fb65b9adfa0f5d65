"""Estimates the cost of an equation, precisely enough to balance work between replicas."""

from math import prod

from fddp.jax_internals import JaxprEqn, Literal, Var, branches, contracted_dims, scan_body
from fddp.jaxpr.equations import inner_equations

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
    elements = sum(map(prod, map(_shape, eqn.outvars)))
    if name == "dot_general":
        shape = _shape(eqn.invars[0])
        return 2 * elements * prod(map(shape.__getitem__, contracted_dims(eqn)))
    if name == "cond":
        return max(sum(map(operations, branch.jaxpr.eqns)) for branch in branches(eqn))
    if name in FACTORS:
        return elements * min(_shape(eqn.invars[0])[-2:], default=1)
    inner = sum(map(operations, inner_equations(eqn)))
    if name == "scan":
        return scan_body(eqn)[1]["length"] * inner
    return inner or elements


def _shape(atom: Var | Literal) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
