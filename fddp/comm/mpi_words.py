"""MPI's implementations of JAX's collectives over the replicas' axis.

A collective of subsets (`axis_index_groups`) gathers all arrays on all replicas, and each replica
selects those of its subset: a subset has no communicator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator, exact_bits, mpi_word
from fddp.comm.translation import Carry, Words
from fddp.jax_internals import (
    JaxprEqn,
    axes_of,
    exchanged_dims,
    gathered_dim,
    scattered_dim,
    sets_of,
    ways_of,
)

Rows = Shaped[Array, "replicas ..."]


def mpi_words(comm: Any, communicator: Communicator) -> Words:
    """Maps each collective primitive's name to its implementation on an mpi4py communicator."""
    rank = comm.rank

    def others(eqn: JaxprEqn) -> tuple[int, ...]:
        """Returns the replicas in this replica's subset of an equation, itself included."""
        return next(
            (subset for subset in sets_of(eqn) or () if rank in subset), tuple(range(comm.size))
        )

    def rows_of(eqn: JaxprEqn, x: Array) -> Rows:
        """Gathers the arrays of this replica's subset."""
        rows = communicator.all_gather(x)
        if sets_of(eqn) is None:
            return rows
        return jnp.stack([rows[k] for k in others(eqn)])

    def exchanged(eqn: JaxprEqn, rows: Rows) -> Rows:
        """Sends row k to the k-th replica of the subset; row k of the result is from it."""
        if sets_of(eqn) is None:
            return communicator.all_to_all(rows)
        return rows_of(eqn, rows)[:, others(eqn).index(rank)]

    def psum(eqn: JaxprEqn, x: Array) -> Array:
        x = jnp.sum(x, _dims(eqn), x.dtype)
        if sets_of(eqn) is None:
            return communicator.all_reduce(x)
        return _added(rows_of(eqn, x))

    def extreme(reduction: Callable[..., Array], eqn: JaxprEqn, x: Array) -> Array:
        # MPI's own maximum ignores NaN.
        return reduction(rows_of(eqn, reduction(x, _dims(eqn))), 0)

    def all_gather(eqn: JaxprEqn, x: Array) -> Array:
        dim, tiled = gathered_dim(eqn)
        rows = rows_of(eqn, x)
        if tiled:
            return jnp.concatenate(list(rows), dim)
        return jnp.moveaxis(rows, 0, dim)

    def psum_scatter(eqn: JaxprEqn, x: Array) -> Array:
        dim, tiled = scattered_dim(eqn)
        rows = jnp.stack(jnp.split(x, len(others(eqn)), dim))
        total = _added(exchanged(eqn, rows))
        if tiled:
            return total
        return jnp.squeeze(total, dim)

    def all_to_all(eqn: JaxprEqn, x: Array) -> Array:
        cut, joined = exchanged_dims(eqn)
        rows = jnp.stack(jnp.split(x, len(others(eqn)), cut))
        return jnp.concatenate(list(exchanged(eqn, rows)), joined)

    words: dict[str, Callable[[JaxprEqn, Array], Array]] = {
        "psum": psum,
        "pmax": partial(extreme, jnp.max),
        "pmin": partial(extreme, jnp.min),
        "all_gather": all_gather,
        "reduce_scatter": psum_scatter,
        "all_to_all": all_to_all,
        "ppermute": partial(_permuted, comm),
    }
    index: Carry = lambda eqn, inputs: [jnp.int32(rank)]  # noqa: E731
    return {name: partial(_of_one_array, word) for name, word in words.items()} | {
        "axis_index": index
    }


def _of_one_array(
    word: Callable[[JaxprEqn, Array], Array], eqn: JaxprEqn, inputs: Sequence[Array]
) -> list[Array]:
    return [word(eqn, jnp.asarray(inputs[0]))]


def _permuted(comm: Any, eqn: JaxprEqn, x: Array) -> Array:
    """Sends an array to its target, and returns the received array; zeros without a source."""
    import mpi4jax
    from mpi4py import MPI

    targets = dict(ways_of(eqn))
    sources = {target: source for source, target in targets.items()}
    target = targets.get(comm.rank, MPI.PROC_NULL)
    source = sources.get(comm.rank, MPI.PROC_NULL)
    move = exact_bits(lambda x: mpi4jax.sendrecv(x, x, source, target, comm=comm))
    received = x if target == source == comm.rank else move(x)
    return received if comm.rank in sources else jnp.zeros_like(x)


def _added(rows: Rows) -> Array:
    """Adds the replicas' arrays, 16-bit floats in 32 bits."""
    return jnp.sum(mpi_word(rows), 0).astype(rows.dtype)


def _dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the dims reduced together with the replicas' axis: those of a `vmap` of that name."""
    return tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
