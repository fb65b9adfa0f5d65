"""JAX's collectives over the replicas' axis, in MPI's words.

Where only some replicas speak among themselves (`axis_index_groups`) all arrays come to all, and each takes those of
its own set: a set has no communicator of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm.communicator import Communicator, exact_bits, mpi_word
from fddp.comm.translation import Carry, Words
from fddp.jax_internals import JaxprEqn, axes_of, exchanged_dims, gathered_dim, scattered_dim, sets_of, ways_of

Rows = Shaped[Array, "replicas ..."]


def mpi_words(comm: Any, communicator: Communicator) -> Words:
    """Makes MPI's word for each of JAX's collectives.

    Args:
      comm: an mpi4py communicator that nothing else uses.
      communicator: its collectives inside a program.

    Returns:
      The words, by the names of primitives.
    """
    rank = comm.rank

    def others(eqn: JaxprEqn) -> tuple[int, ...]:
        """The replicas that this one speaks with in an equation, itself among them."""
        return next((one for one in sets_of(eqn) or () if rank in one), tuple(range(comm.size)))

    def rows_of(eqn: JaxprEqn, x: Array) -> Rows:
        """Everybody's arrays, of those that speak together."""
        rows = communicator.all_gather(x)
        return rows if sets_of(eqn) is None else jnp.stack([rows[k] for k in others(eqn)])

    def exchanged(eqn: JaxprEqn, rows: Rows) -> Rows:
        """Row k for the k-th replica; row k of the result came from it."""
        if sets_of(eqn) is None:
            return communicator.all_to_all(rows)
        return rows_of(eqn, rows)[:, others(eqn).index(rank)]

    def psum(eqn: JaxprEqn, x: Array) -> Array:
        x = jnp.sum(x, _dims(eqn), x.dtype)
        return communicator.all_reduce(x) if sets_of(eqn) is None else _added(rows_of(eqn, x))

    def extreme(of: Callable[..., Array], eqn: JaxprEqn, x: Array) -> Array:
        # MPI's own maximum knows nothing of NaN.
        return of(rows_of(eqn, of(x, _dims(eqn))), 0)

    def all_gather(eqn: JaxprEqn, x: Array) -> Array:
        dim, tiled = gathered_dim(eqn)
        rows = rows_of(eqn, x)
        return jnp.concatenate(list(rows), dim) if tiled else jnp.moveaxis(rows, 0, dim)

    def psum_scatter(eqn: JaxprEqn, x: Array) -> Array:
        dim, tiled = scattered_dim(eqn)
        rows = jnp.stack(jnp.split(x, len(others(eqn)), dim))
        total = _added(exchanged(eqn, rows))
        return total if tiled else jnp.squeeze(total, dim)

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
    index: Carry = lambda eqn, given: [jnp.int32(rank)]  # noqa: E731
    return {name: partial(_of_one_array, word) for name, word in words.items()} | {"axis_index": index}


def _of_one_array(word: Callable[[JaxprEqn, Array], Array], eqn: JaxprEqn, given: Any) -> list[Array]:
    return [word(eqn, jnp.asarray(given[0]))]


def _permuted(comm: Any, eqn: JaxprEqn, x: Array) -> Array:
    """Sends an array on its way, and gives the one that comes; zeros, if none does."""
    import mpi4jax
    from mpi4py import MPI

    targets = dict(ways_of(eqn))
    sources = {target: source for source, target in targets.items()}
    to = targets.get(comm.rank, MPI.PROC_NULL)
    of = sources.get(comm.rank, MPI.PROC_NULL)
    move = exact_bits(lambda x: mpi4jax.sendrecv(x, x, of, to, comm=comm))
    came = x if to == of == comm.rank else move(x)
    return came if comm.rank in sources else jnp.zeros_like(x)


def _added(rows: Rows) -> Array:
    """The sum of the replicas' arrays; 16-bit floats are added in 32 bits."""
    return jnp.sum(mpi_word(rows), 0).astype(rows.dtype)


def _dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dims of an array that are reduced beside the replicas' axis: those of a `vmap` of the same name."""
    return tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
