"""Splits a program by output, so that at most one large value is in memory at a time.

The initialisation of a model derives keys from keys, and a leaf from each key. `seeded` separates
the keys, which are small and different for each leaf, from the large computations, which are alike
for equal layers. `pieces` extracts the equations of some outputs as a separate program.
"""

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
    without_dead_code,
)
from fddp.jaxpr.cost import operations
from fddp.jaxpr.equations import (
    OF_A_REPLICA,
    form_of,
    maker_positions,
    read_by,
    straighten,
    variables,
)
from fddp.jaxpr.flow import joined
from fddp.jaxpr.interpreter import Read, interpret

MOST_SEEDS = 4096  # elements of an array of seeds, which holds the keys of many layers
DRAWN = "random_bits"  # the source of a leaf's numbers
TWICE = 2


class Piece(NamedTuple):
    """The equations of some outputs of a program, as a separate program."""

    program: ClosedJaxpr
    reads: tuple[int, ...]
    """Positions of its inputs among those of the whole program."""
    makes: tuple[int, ...]
    """Positions of its outputs among those of the whole program."""


def pieces(closed: ClosedJaxpr, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Extracts a piece for each group of outputs; pieces may repeat equations.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, y: (x + 1.0, x * y))(1.0, 2.0)
    >>> [(piece.reads, len(piece.program.jaxpr.eqns)) for piece in pieces(program, [[0], [1]])]
    [((0,), 1), ((0, 1), 1)]
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    maker = maker_positions(jaxpr)
    consts = dict(zip(jaxpr.constvars, program.consts))

    def piece(group: Sequence[int]) -> Piece:
        outputs = [jaxpr.outvars[k] for k in group]
        eqns = [jaxpr.eqns[position] for position in _needed(jaxpr, maker, outputs)]
        used = dict.fromkeys([*variables(outputs), *read_by(eqns)])
        used_consts = {var: consts[var] for var in used if var in consts}
        # A loop is a single equation: this drops the values in it that these outputs do not need.
        live, reads = without_dead_code(
            make_program(program, eqns, jaxpr.invars, outputs, used_consts)
        )
        return Piece(live, reads, tuple(group))

    return list(map(piece, groups))


def each_alone(closed: ClosedJaxpr) -> list[Piece]:
    """Extracts a piece for each output, or a single piece if these cost over twice its operations.

    They do if all outputs are computed from a large common value.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((8, 8))
    >>> [piece.makes for piece in each_alone(jax.make_jaxpr(lambda x: (x @ x, x + 1))(x))]
    [(0,), (1,)]
    >>> [piece.makes for piece in each_alone(jax.make_jaxpr(lambda x: tuple((x @ x)[:3]))(x))]
    [(0, 1, 2)]
    """
    positions = range(len(closed.jaxpr.outvars))
    joint = pieces(closed, [positions])
    separate = pieces(closed, [[position] for position in positions])
    return separate if _operations(separate) <= TWICE * _operations(joint) else joint


def inputs_of_outputs(closed: ClosedJaxpr) -> list[frozenset[int]]:
    """Finds the inputs that each output of a program may depend on.

    >>> import jax
    >>> inputs_of_outputs(jax.make_jaxpr(lambda x, y: (x + 1.0, x * y, 3.0))(1.0, 2.0))
    [frozenset({0}), frozenset({0, 1}), frozenset()]
    """
    jaxpr = straighten(closed).jaxpr
    inputs = [frozenset([position]) for position in range(len(jaxpr.invars))]
    nothing = frozenset[int]()
    sources = joined(jaxpr, inputs, lambda sets: nothing.union(*sets), nothing)
    return list(map(sources, jaxpr.outvars))


def seeded(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Splits a program without inputs in two: the first returns the seeds, the second takes them.

    Seeds are random keys, and small arrays of integers computed from keys: any program computes the
    same bits. Floats stay in the second program, since XLA rounds a constant and an input of a
    program differently.

    >>> import jax
    >>> def make():
    ...     first, second = jax.random.split(jax.random.key(0))
    ...     return jax.random.normal(first, (2,)), jax.random.normal(second, (2,))
    >>> seeds, remainder = seeded(jax.make_jaxpr(make)())
    >>> len(remainder.jaxpr.invars)
    2
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    consts = dict(zip(jaxpr.constvars, program.consts))
    returned = set(variables(jaxpr.outvars))
    small = set(filter(_is_small, consts))
    seeds = set(filter(_is_key, small))
    seed_eqns = [eqn for eqn in jaxpr.eqns if _draws(eqn, small, seeds, returned)]
    leaf_eqns = [eqn for eqn in jaxpr.eqns if seeds.isdisjoint(eqn.outvars)]
    read = dict.fromkeys([*variables(jaxpr.outvars), *read_by(leaf_eqns)])
    passed = list(filter(seeds.__contains__, read))
    first = make_program(program, seed_eqns, [], passed, consts)
    leaf_consts = {var: x for var, x in consts.items() if var not in seeds}
    second = make_program(program, leaf_eqns, passed, jaxpr.outvars, leaf_consts)
    return without_dead_code(first)[0], second


def run_seeds(seeds: ClosedJaxpr) -> list[Any]:
    """Computes the seeds equation by equation: each kind is compiled once, not once per leaf."""

    def slice_keys(eqn: JaxprEqn, read: Read) -> list[Any] | None:
        bounds = along_first_dim(eqn)
        if bounds is None:
            return None
        # With the begin as an input, all slices of many keys share a program.
        begin, end = bounds
        return [jax.lax.dynamic_slice_in_dim(read(eqn.invars[0]), begin, end - begin)]

    return interpret(seeds, [], slice_keys)


def _draws(eqn: JaxprEqn, small: set[Var], seeds: set[Var], returned: set[Var]) -> bool:
    """Returns True if an equation computes small values from small values alone.

    Adds its outputs to `small`, and to `seeds` if they are keys or computed from seeds.
    """
    inputs = set(variables(eqn.invars))
    outputs = set(eqn.outvars)
    if (
        acts(eqn)
        or eqn.primitive.name in OF_A_REPLICA | {DRAWN}
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
    """Returns True for a small array of integers or keys."""
    form = form_of(var)
    is_seed = jnp.issubdtype(form.dtype, jnp.integer) or _is_key(var)
    return is_seed and form.size <= MOST_SEEDS


def _is_key(var: Var) -> bool:
    return jnp.issubdtype(form_of(var).dtype, jax.dtypes.prng_key)


def _needed(jaxpr: Jaxpr, maker: dict[Var, int], outputs: Sequence[Var | Literal]) -> list[int]:
    """Positions of the equations that some values depend on, in order."""
    pending = list(outputs)
    positions: set[int] = set()
    while pending:
        atom = pending.pop()
        if isinstance(atom, Literal) or atom not in maker or maker[atom] in positions:
            continue
        positions.add(maker[atom])
        pending += jaxpr.eqns[maker[atom]].invars
    return sorted(positions)


def _operations(pieces: Sequence[Piece]) -> int:
    return sum(sum(map(operations, piece.program.jaxpr.eqns)) for piece in pieces)
