"""Runs a program output by output, so that no more than one large value is there at a time.

A model is made leaf by leaf: keys are drawn from keys, and from each key a leaf. `seeded` parts the drawing of keys,
which is small and different for each leaf, from the rest, which is large and alike for equal layers. `pieces` gives the
equations that some outputs need, and no others, as programs of their own.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    along_first_dim,
    make_program,
    run_as_it_is,
    without_dead_code,
)
from fddp.jaxpr.cost import operations
from fddp.jaxpr.equations import straighten, variables
from fddp.jaxpr.flow import flow

MOST_SEEDS = 4096  # numbers in an array of seeds: keys for each of many layers
DRAWN = "random_bits"  # what a leaf is made of
TWICE = 2


class Piece(NamedTuple):
    """The part of a program that makes some of its outputs."""

    program: ClosedJaxpr
    reads: tuple[int, ...]
    """Numbers of the program's inputs that it takes."""
    makes: tuple[int, ...]
    """Numbers of the program's outputs that it returns."""


def pieces(closed: ClosedJaxpr, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Finds the part of a program that each group of its outputs needs.

    Args:
      closed: the program.
      groups: numbers of outputs.

    Returns:
      The parts, in the order of the groups. What several groups need is in each of them.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x, y: (x + 1.0, x * y))(1.0, 2.0)
      >>> [(piece.reads, len(piece.program.jaxpr.eqns)) for piece in pieces(program, [[0], [1]])]
      [((0,), 1), ((0, 1), 1)]
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    maker = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    consts = dict(zip(jaxpr.constvars, program.consts))

    def piece(group: Sequence[int]) -> Piece:
        outputs = [jaxpr.outvars[k] for k in group]
        eqns = [jaxpr.eqns[at] for at in _needed(jaxpr, maker, outputs)]
        used = dict.fromkeys(variables([*outputs, *(atom for eqn in eqns for atom in eqn.invars)]))
        some = {var: consts[var] for var in used if var in consts}
        # Of a loop, which is one equation, only the values are left that these outputs need.
        part, reads = without_dead_code(make_program(program, eqns, jaxpr.invars, outputs, some))
        return Piece(part, reads, tuple(group))

    return [piece(group) for group in groups]


def each_alone(closed: ClosedJaxpr) -> list[Piece]:
    """Finds the part of a program that each output needs.

    Args:
      closed: the program.

    Returns:
      A part for each output. Or all of the program, where the parts together would have more than twice as much to do:
      so it is where all outputs come of one large value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((8, 8))
      >>> [piece.makes for piece in each_alone(jax.make_jaxpr(lambda x: (x @ x, x + 1))(x))]
      [(0,), (1,)]
      >>> [piece.makes for piece in each_alone(jax.make_jaxpr(lambda x: tuple((x @ x)[:3]))(x))]
      [(0, 1, 2)]
    """
    numbers = range(len(closed.jaxpr.outvars))
    together = pieces(closed, [numbers])
    each = pieces(closed, [[number] for number in numbers])
    return each if _operations(each) <= TWICE * _operations(together) else together


def inputs_of_outputs(closed: ClosedJaxpr) -> list[frozenset[int]]:
    """Finds the inputs that each output of a program may come from.

    Args:
      closed: the program.

    Returns:
      For each output the numbers of inputs.

    Example:
      >>> import jax
      >>> inputs_of_outputs(jax.make_jaxpr(lambda x, y: (x + 1.0, x * y, 3.0))(1.0, 2.0))
      [frozenset({0}), frozenset({0, 1}), frozenset()]
    """
    jaxpr = straighten(closed).jaxpr
    own = [frozenset([number]) for number in range(len(jaxpr.invars))]
    nothing = frozenset[int]()
    of = flow(jaxpr, own, lambda eqn, given: [nothing.union(*given)] * len(eqn.outvars), lambda atom: nothing)
    return [of(atom) for atom in jaxpr.outvars]


def seeded(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Parts the drawing of random keys from the rest of a program without inputs.

    Keys, and small whole numbers made of keys, are the same bits whatever program computes them. Floats are left where
    they are, since XLA rounds a constant otherwise than a value that a program is given.

    Args:
      closed: a program without inputs.

    Returns:
      The program that makes the seeds; and the rest, which takes them and returns what the program returned.

    Example:
      >>> import jax
      >>> def make():
      ...     one, two = jax.random.split(jax.random.key(0))
      ...     return jax.random.normal(one, (2,)), jax.random.normal(two, (2,))
      >>> seeds, rest = seeded(jax.make_jaxpr(make)())
      >>> len(rest.jaxpr.invars)
      2
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    consts = dict(zip(jaxpr.constvars, program.consts))
    returned = set(variables(jaxpr.outvars))
    small = {var for var in consts if _is_small(var)}
    seeds = {var for var in small if _is_key(var)}
    own = [eqn for eqn in jaxpr.eqns if _draws(eqn, small, seeds, returned)]
    others = [eqn for eqn in jaxpr.eqns if seeds.isdisjoint(eqn.outvars)]
    read = [*jaxpr.outvars, *(atom for eqn in others for atom in eqn.invars)]
    handed = [var for var in dict.fromkeys(variables(read)) if var in seeds]
    first = make_program(program, own, [], handed, consts)
    rest = make_program(
        program, others, handed, jaxpr.outvars, {var: x for var, x in consts.items() if var not in seeds}
    )
    return without_dead_code(first)[0], rest


def run_seeds(seeds: ClosedJaxpr) -> list[Any]:
    """Makes the seeds, equation by equation, so that each kind of drawing is compiled once, and not once for each leaf.

    Args:
      seeds: from `seeded`.

    Returns:
      Its outputs.
    """
    values = dict[Any, Any](zip(seeds.jaxpr.constvars, seeds.consts))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in seeds.jaxpr.eqns:
        args = [value(atom) for atom in eqn.invars]
        bounds = along_first_dim(eqn)
        if bounds is None:
            made = run_as_it_is(seeds, eqn, args)
        else:  # one of many keys: by a number that is given all of them are taken by one program
            begin, end = bounds
            made = [jax.lax.dynamic_slice_in_dim(args[0], begin, end - begin)]
        values.update(zip(eqn.outvars, made))
    return [value(atom) for atom in seeds.jaxpr.outvars]


def _draws(eqn: JaxprEqn, small: set[Var], seeds: set[Var], returned: set[Var]) -> bool:
    """Whether an equation makes small whole numbers of nothing else; notes them, and which of them are seeds."""
    inputs = set(variables(eqn.invars))
    outputs = set(eqn.outvars)
    if (
        acts(eqn)
        or eqn.primitive.name == DRAWN
        or not inputs <= small
        or not all(map(_is_small, outputs))
        or outputs & returned
    ):
        return False
    small |= outputs
    if inputs & seeds or any(map(_is_key, outputs)):
        seeds |= outputs
    return True


def _is_small(var: Var) -> bool:
    """Whether it is a few whole numbers or keys."""
    aval: Any = var.aval
    return math.prod(aval.shape) <= MOST_SEEDS and (jnp.issubdtype(aval.dtype, jnp.integer) or _is_key(var))


def _is_key(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)  # pyright: ignore[reportAttributeAccessIssue]


def _needed(jaxpr: Jaxpr, maker: dict[Var, int], outputs: Sequence[Any]) -> list[int]:
    """The equations that some values need, in their order."""
    pending = [maker[var] for var in variables(outputs) if var in maker]
    found: set[int] = set()
    while pending:
        at = pending.pop()
        if at not in found:
            found.add(at)
            pending += [maker[var] for var in variables(jaxpr.eqns[at].invars) if var in maker]
    return sorted(found)


def _operations(pieces: Sequence[Piece]) -> int:
    return sum(operations(eqn) for piece in pieces for eqn in piece.program.jaxpr.eqns)
