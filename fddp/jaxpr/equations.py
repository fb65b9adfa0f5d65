"""Flattens a program into a list of equations, and finds those that are cheap or collective."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Any

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

# XLA fuses these equations into the readers of their results, and repeats them there rather than
# store a result.
CHEAP = {
    *("add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "square"),
    *("integer_pow", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n"),
    *("clamp", "stop_gradient", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"),
    *("convert_element_type", "iota", "copy", "transpose", "dynamic_slice", "one_minus_square"),
}
# Each element of the result is computed from an element of each input.
ELEMENTWISE = {
    *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2", "nextafter"),
    *("select_n", "clamp", "and", "or", "not", "xor", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "population_count", "eq", "ne", "lt", "le", "gt", "ge"),
    *("is_finite", "neg", "sign", "abs", "square", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp"),
    *("exp2", "expm1", "log", "log1p", "logistic", "tanh", "sinh", "cosh", "asinh", "acosh"),
    *("atanh", "sin", "cos", "tan", "asin", "acos", "atan", "erf", "erfc", "erf_inv", "lgamma"),
    *("digamma", "floor", "ceil", "round", "real", "imag", "conj", "complex"),
    *("convert_element_type", "reduce_precision", "copy", "log2", "one_minus_square"),
}
# These keep the elements and their order, and change only the dims or the placement.
RESHAPES = {"reshape", "squeeze", "expand_dims", "sharding_constraint"}


def straighten(closed: ClosedJaxpr, calls: Set[str] = frozenset(WRAPPERS)) -> ClosedJaxpr:
    """Inlines the nested `jit`s of a program, or the equations named in `calls`.

    Loops, branches and, by default, rematerialised functions stay single equations. A
    rematerialised function with a loop over layers is inlined, so that the loop is like any other.
    """
    called = lambda eqn: (  # noqa: E731
        eqn.primitive.name in calls or (eqn.primitive.name in REMATERIALISED and _loops(eqn))
    )
    if not any(map(called, closed.jaxpr.eqns)):
        return closed
    eqns: list[JaxprEqn] = []
    consts: dict[Var, Any] = {}

    def write(inner: ClosedJaxpr, args: Sequence[Var | Literal]) -> list[Any]:
        # Every variable is replaced: JAX shares the body of a function between its calls.
        names: dict[Var, Any] = dict(zip(inner.jaxpr.invars, args))
        for var, value in zip(inner.jaxpr.constvars, inner.consts):
            names[var] = new_variable(var)
            consts[names[var]] = value

        def read(atom: Var | Literal) -> Any:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in inner.jaxpr.eqns:
            inputs = list(map(read, eqn.invars))
            if eqn.primitive.name in calls:
                outputs = write(called_program(eqn), inputs)
            elif eqn.primitive.name in REMATERIALISED and _loops(eqn):
                outputs = write(called_program(eqn), write(barrier_before(eqn), inputs))
            else:
                outputs = list(map(new_variable, eqn.outvars))
                eqns.append(eqn.replace(invars=inputs, outvars=outputs))
            names.update(zip(eqn.outvars, outputs))
        return list(map(read, inner.jaxpr.outvars))

    outputs = write(closed, closed.jaxpr.invars)
    return make_program(closed, eqns, closed.jaxpr.invars, outputs, consts)


def collectives(closed: ClosedJaxpr) -> set[str]:
    """Names of the collectives in a program, at any depth: over a mesh axis, MPI's, or a lane's."""
    return set(_collectives(closed.jaxpr.eqns))


def text_digest(closed: ClosedJaxpr) -> str:
    """Hashes a program's equations, without the addresses of functions in this process."""
    return hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(closed.jaxpr)).encode()).hexdigest()


def variables(atoms: Iterable[Var | Literal]) -> Iterator[Var]:
    """The variables among the inputs or outputs of equations, without the literals."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


def form_of(atom: Var | Literal) -> Any:
    """The shape and dtype of a value."""
    return atom.aval


def maker_positions(jaxpr: Jaxpr) -> dict[Var, int]:
    """Variable → position of the equation that computes it."""
    positions = dict[Var, int]()
    for position, eqn in enumerate(jaxpr.eqns):
        positions.update(dict.fromkeys(eqn.outvars, position))
    return positions


def read_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read, in order, each of them once."""
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)))


def outputs_of(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations compute, in order."""
    return [var for eqn in eqns for var in eqn.outvars]


def makers(eqns: Sequence[JaxprEqn], values: Iterable[Var]) -> list[JaxprEqn]:
    """Selects, in order, the equations that values depend on."""
    required = set(values)
    selected: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if not required.isdisjoint(eqn.outvars):
            selected.append(eqn)
            required.update(variables(eqn.invars))
    return selected[::-1]


def cheap(eqn: JaxprEqn) -> bool:
    """Returns True if XLA fuses an equation into its neighbours, at next to no cost."""
    if eqn.primitive.name in WRAPPERS | OWN_DERIVATIVE:
        return all(map(cheap, inner_equations(eqn)))
    return eqn.primitive.name in CHEAP


def inner_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the programs inside an equation."""
    return chain.from_iterable(body.eqns for body in inner_programs(eqn))


def _loops(eqn: JaxprEqn) -> bool:
    """Returns True if a rematerialised function contains a `scan`, possibly in a nested `jit`."""
    for inner in inner_equations(eqn):
        name = inner.primitive.name
        if name == "scan" or (name in WRAPPERS | REMATERIALISED and _loops(inner)):
            return True
    return False


def _collectives(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    for eqn in eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES or name.endswith("_mpi") or name == "fddp_exchange":
            yield name
        yield from _collectives(inner_equations(eqn))
