"""Translates the collectives of a program into those of a transport unknown to XLA.

JAX writes `psum` and similar collectives as equations over a named axis, and XLA runs them over a
mesh. Replicas without a mesh run such an equation as an operation of the transport: in the program
itself, in the body of a loop, in a branch. On a rank without a mesh, a collective of subsets
(`axis_index_groups`) gathers all arrays on all replicas, and each replica selects those of its
subset: a subset has no communicator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator, mpi_word
from fddp.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    axes_of,
    dims_of,
    inner_programs,
    sets_of,
    ways_of,
)
from fddp.jaxpr import Read, interpret, run_inner

Rows = Shaped[Array, "replicas ..."]


def has_collectives(jaxpr: Jaxpr, axis_name: str) -> bool:
    """Returns True if a program has equations over an axis, at any depth."""
    return any(_over(eqn, axis_name) for eqn in jaxpr.eqns)


def run_translated(
    closed: ClosedJaxpr, axis_name: str, subsets: "Subsets", *args: Any
) -> list[Any]:
    """Runs a program on a rank, with its collectives over an axis as operations of the transport.

    The program contains its derivatives, so no caller differentiates the run.
    """

    def run(closed: ClosedJaxpr, state: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        return state, run_translated(closed, axis_name, subsets, *inputs)

    def translate(eqn: JaxprEqn, read: Read) -> Sequence[Any] | None:
        if not _over(eqn, axis_name):
            return None
        inputs = list(map(read, eqn.invars))
        if inner_programs(eqn):
            return run_inner(eqn, inputs, run)[1]
        name = eqn.primitive.name
        if name not in WORDS:
            raise ValueError(
                f"the loss has the collective {name} over {axis_name!r}, which this backend does "
                "not support: use backend 'gloo' or 'nccl'."
            )
        return [WORDS[name](subsets, eqn, *map(jnp.asarray, inputs))]

    return interpret(closed, args, translate)


def _over(eqn: JaxprEqn, axis_name: str) -> bool:
    inner = inner_programs(eqn)
    if not inner:
        return axis_name in axes_of(eqn)
    return any(has_collectives(body, axis_name) for body in inner)


class Subsets(NamedTuple):
    """A rank, and its exchanges with the subset of replicas that an equation names."""

    rank: int
    communicator: Communicator

    def members(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """Returns the replicas in this replica's subset of an equation, itself included."""
        for subset in sets_of(eqn) or ():
            if self.rank in subset:
                return subset
        return tuple(range(self.communicator.size))

    def gathered(self, eqn: JaxprEqn, x: Array) -> Rows:
        """Gathers the arrays of this replica's subset."""
        rows = self.communicator.all_gather(x)
        if sets_of(eqn) is None:
            return rows
        return jnp.stack([rows[k] for k in self.members(eqn)])

    def exchanged(self, eqn: JaxprEqn, rows: Rows) -> Rows:
        """Sends row k to the k-th replica of the subset; row k of the result is from it."""
        if sets_of(eqn) is None:
            return self.communicator.all_to_all(rows)
        return self.gathered(eqn, rows)[:, self.members(eqn).index(self.rank)]


def _psum(subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    x = jnp.sum(x, _dims(eqn), x.dtype)
    if sets_of(eqn) is None:
        return subsets.communicator.all_reduce(x)
    return _added(subsets.gathered(eqn, x))


def _extreme(reduction: Callable[..., Array], subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    # MPI's own maximum ignores NaN.
    return reduction(subsets.gathered(eqn, reduction(x, _dims(eqn))), 0)


def _all_gather(subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    dim, tiled = dims_of(eqn)
    rows = subsets.gathered(eqn, x)
    if tiled:
        return jnp.concatenate(list(rows), dim)
    return jnp.moveaxis(rows, 0, dim)


def _psum_scatter(subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    dim, tiled = dims_of(eqn)
    rows = jnp.stack(jnp.split(x, len(subsets.members(eqn)), dim))
    total = _added(subsets.exchanged(eqn, rows))
    if tiled:
        return total
    return jnp.squeeze(total, dim)


def _all_to_all(subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    split_dim, concat_dim = dims_of(eqn)
    rows = jnp.stack(jnp.split(x, len(subsets.members(eqn)), split_dim))
    return jnp.concatenate(list(subsets.exchanged(eqn, rows)), concat_dim)


def _permuted(subsets: Subsets, eqn: JaxprEqn, x: Array) -> Array:
    """Returns the array of this replica's source; zeros without a source."""
    # All ranks run the same equations: where dependencies differ, messages leave in another order.
    sources = np.full(subsets.communicator.size, -1)
    for source, target in ways_of(eqn):
        sources[target] = source
    source = jnp.asarray(sources)[subsets.communicator.replica_index()]
    received = subsets.communicator.all_gather(x)[source]
    return jnp.where(source >= 0, received, jnp.zeros_like(x))


def _added(rows: Rows) -> Array:
    """Adds the replicas' arrays, 16-bit floats in 32 bits."""
    return jnp.sum(mpi_word(rows), 0).astype(rows.dtype)


def _dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the dims reduced together with the replicas' axis: those of a `vmap` of that name."""
    return tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))


# Name of a primitive → its implementation on a rank.
WORDS: dict[str, Callable[..., Array]] = {
    "psum": _psum,
    "pmax": partial(_extreme, jnp.max),
    "pmin": partial(_extreme, jnp.min),
    "all_gather": _all_gather,
    "reduce_scatter": _psum_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _permuted,
    "axis_index": lambda subsets, eqn: subsets.communicator.replica_index(),
}
