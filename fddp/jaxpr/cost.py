"""The rough cost of an equation: enough to share out work among ranks."""

from math import prod
from typing import Any

from fddp.jax_internals import Jaxpr, JaxprEqn, branches, contracted_dims, inner_programs, scan_body

# Decompositions: each costs about as many operations as a product of the matrix with itself.
FACTORS = {"cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve"}


def operations(eqn: JaxprEqn) -> int:
    """Counts the operations of an equation.

    Args:
      eqn: any equation.

    Returns:
      Multiplications and additions of a product, one operation for each element of any other result. A loop counts all
      its rounds, where their number is known. Branches count as the longest of them.
    """
    name = eqn.primitive.name
    made = sum(prod(_shape(var)) for var in eqn.outvars)
    if name == "dot_general":
        return 2 * made * prod(_shape(eqn.invars[0])[dim] for dim in contracted_dims(eqn))
    if name == "scan":
        body, settings = scan_body(eqn)
        return settings["length"] * _all(body.jaxpr)
    if name == "cond":
        return max(_all(branch.jaxpr) for branch in branches(eqn))
    inside = sum(map(_all, inner_programs(eqn)))
    if name in FACTORS:
        return made * min(_shape(eqn.invars[0])[-2:], default=1)
    return inside or made


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _all(program: Jaxpr) -> int:
    return sum(map(operations, program.eqns))
