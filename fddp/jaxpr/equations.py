"""Writes a program as one list of equations, and finds the cheap ones and those that talk to other replicas."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from fddp.jax_internals import (
    COLLECTIVES,
    OWN_DERIVATIVE,
    REMATERIALISED,
    WRAPPERS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    barrier_before,
    called_program,
    inner_programs,
    make_program,
    new_variable,
)

# Equations that XLA fuses into those that read their result, and repeats there rather than store it.
CHEAP = {
    *("add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "square", "integer_pow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "clamp", "stop_gradient"),
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "iota", "copy", "transpose"),
    "dynamic_slice",
}


def straighten(closed: ClosedJaxpr, calls: Set[str] = frozenset(WRAPPERS)) -> ClosedJaxpr:
    """Writes the contents of nested `jit`s in their places, so that the program is one list of equations.

    Args:
      closed: any program.
      calls: names of the equations whose contents are written out: those of `CALLS`, or fewer.

    Returns:
      An equal program without these. Loops, branches and, by default, rematerialised parts stay single equations; but
      not a part that holds a loop over layers, whose rounds are then equations like those of any other loop.
    """
    eqns: list[JaxprEqn] = []
    consts: dict[Var, Any] = {}

    def write(inner: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        # Every name is made anew: JAX shares the body of a function that is called twice.
        names: dict[Var, Any] = dict(zip(inner.jaxpr.invars, args))
        for var, value in zip(inner.jaxpr.constvars, inner.consts):
            names[var] = new_variable(var)
            consts[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in inner.jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in calls:
                outputs = write(called_program(eqn), inputs)
            elif eqn.primitive.name in REMATERIALISED and _loops(eqn):
                outputs = write(called_program(eqn), write(barrier_before(eqn), inputs))
            else:
                outputs = [new_variable(var) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=inputs, outvars=outputs))
            names.update(zip(eqn.outvars, outputs))
        return [read(atom) for atom in inner.jaxpr.outvars]

    outputs = write(closed, closed.jaxpr.invars)
    return make_program(closed, eqns, closed.jaxpr.invars, outputs, consts)


def collectives(closed: ClosedJaxpr) -> set[str]:
    """Names of the collectives in a program, at any depth: sums and exchanges over a mesh axis, or MPI's."""
    return _collectives(closed.jaxpr)


def text_digest(closed: ClosedJaxpr) -> str:
    """A hash of a program's equations, without the addresses of functions in this process."""
    return hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(closed.jaxpr)).encode()).hexdigest()


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """The variables among the inputs or outputs of equations; the others are literals."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


def makers(eqns: Sequence[JaxprEqn], values: Iterable[Var], also: Iterable[JaxprEqn] = ()) -> list[JaxprEqn]:
    """Finds the equations by which values are made.

    Args:
      eqns: the equations to choose from.
      values: what is wanted.
      also: equations that are wanted besides, with those that make what they read.

    Returns:
      The equations, in order.
    """
    wanted = set(values)
    ids = set(map(id, also))
    made: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if id(eqn) in ids or not wanted.isdisjoint(eqn.outvars):
            made.append(eqn)
            wanted.update(variables(eqn.invars))
    return made[::-1]


def value_of(values: Mapping[Var, Any], atom: Any) -> Any:
    """The value of a variable, or of a literal as an array."""
    if not isinstance(atom, Literal):
        return values[atom]
    form: Any = atom.aval
    return jnp.asarray(atom.val, form.dtype)


def cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation works element by element, without sums or transcendental functions.

    Args:
      eqn: an equation.

    Returns:
      Whether XLA fuses it into its neighbours, where it costs next to nothing.
    """
    if eqn.primitive.name in WRAPPERS | OWN_DERIVATIVE:
        return all(cheap(inner) for body in inner_programs(eqn) for inner in body.eqns)
    return eqn.primitive.name in CHEAP


def _loops(eqn: JaxprEqn) -> bool:
    """Whether a rematerialised part holds a `scan`, be it in a nested `jit`."""
    nested = WRAPPERS | REMATERIALISED
    inside = called_program(eqn).jaxpr.eqns
    return any(one.primitive.name == "scan" or (one.primitive.name in nested and _loops(one)) for one in inside)


def _collectives(jaxpr: Jaxpr) -> set[str]:
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES or name.endswith("_mpi"):
            found.add(name)
        found = found.union(*(_collectives(inner) for inner in inner_programs(eqn)))
    return found
