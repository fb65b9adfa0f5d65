"""Collectives of replicas inside a program: XLA's over a mesh axis, or MPI's through mpi4jax.

Everything that travels within a program goes through a `Communicator`; `count_bytes` counts its bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped, UInt32

from fddp.comm.by_level import ByLevel, Level

MOST = 2**32 - 1


@dataclass(frozen=True)
class Communicator:
    """The collectives of one replica with the others."""

    size: int
    """Number of replicas."""
    replica_index: Callable[[], Int32[Array, ""]]
    """Gives the place of this replica among them."""
    all_reduce: Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]
    """Sums arrays over replicas."""
    all_to_all: Callable[[Shaped[Array, "replicas n"]], Shaped[Array, "replicas n"]]
    """Sends row i to replica i; row i of the result came from replica i."""
    all_gather: Callable[[Shaped[Array, " n"]], Shaped[Array, "replicas n"]]
    """Gives every replica's array to every replica."""
    reduce_scatter: Callable[[Shaped[Array, "replicas n"]], Shaped[Array, " n"]]
    """Sums row i over replicas, for replica i."""
    unrounded: Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]] | None = None
    """The `all_reduce` that does not round, where this one does; None: it does not."""
    native16: bool = False
    """Whether `all_reduce` sends 16-bit floats as they are; XLA:CPU and MPI send them as 32 bits."""
    nodes: int = 1
    """Number of nodes of `size` replicas over which sums go on."""
    levels: "ByLevel[Communicator] | None" = field(default=None, compare=False)
    """The collectives of some of the replicas; None: all are one node."""
    sent: list[Any] | None = field(default=None, compare=False)
    """The bytes of each call so far, inside `count_bytes`, which makes a new list for each count; None outside."""

    @property
    def psum(self) -> Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]:
        """JAX's name for `all_reduce`."""
        return self.all_reduce

    @property
    def exact_sum(self) -> Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]:
        """Sums arrays that must not be rounded, whatever rounds gradients."""
        return self.unrounded or self.all_reduce

    def at(self, level: Level) -> "Communicator":
        """Gives the collectives of some of the replicas.

        Args:
          level: who speaks.

        Returns:
          Their collectives; those of all, where all replicas are one node.
        """
        return self if level == "all" or self.levels is None else getattr(self.levels, level)


def axis_communicator(
    axis_name: str, size: int, platform: str, *, among: Sequence[Sequence[int]] | None = None
) -> Communicator:
    """The collectives of XLA over one axis of a mesh.

    Args:
      axis_name: the axis.
      size: number of replicas that talk to each other.
      platform: platform of the mesh's devices: "cpu", "gpu", "cuda", "tpu".
      among: sets of `size` replicas along the axis; each set talks among itself. None: all replicas are one set.

    Returns:
      The communicator.
    """

    def exchange(rows: Array) -> Array:
        return jax.lax.all_to_all(rows, axis_name, 0, 0, axis_index_groups=among)

    def replica_index() -> Array:
        own = jax.lax.axis_index(axis_name)
        return own if among is None else jnp.asarray(np.argsort(np.ravel(among)) % size, jnp.int32)[own]

    communicator = Communicator(
        size=size,
        replica_index=replica_index,
        all_reduce=lambda x: jax.lax.psum(x, axis_name, axis_index_groups=among),
        all_to_all=exchange,
        all_gather=lambda x: jax.lax.all_gather(x, axis_name, axis_index_groups=among),
        # Gloo's own reduce-scatter gives wrong numbers (jax#40830).
        reduce_scatter=partial(_exchanged_and_added, exchange)
        if platform == "cpu"
        else lambda rows: jax.lax.psum_scatter(rows, axis_name, axis_index_groups=among),
        native16=platform != "cpu",
    )
    return _of_one(communicator)


def mpi_communicator(comm: Any) -> Communicator:
    """The collectives of MPI, inside a program.

    Args:
      comm: an mpi4py communicator that nothing else uses.

    Returns:
      The communicator.
    """
    import mpi4jax
    from mpi4py import MPI

    return rank_communicator(
        comm,
        lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm),
        partial(mpi4jax.alltoall, comm=comm),
        partial(mpi4jax.allgather, comm=comm),
    )


def rank_communicator(
    comm: Any,
    all_reduce: Callable[[Array], Array],
    all_to_all: Callable[[Array], Array],
    all_gather: Callable[[Array], Array],
) -> Communicator:
    """Makes the communicator of a rank of MPI from three collectives that know no 16-bit floats.

    Args:
      comm: an mpi4py communicator.
      all_reduce: sums arrays over its ranks.
      all_to_all: sends row i to rank i.
      all_gather: gives every rank's array to every rank.

    Returns:
      The communicator.
    """
    exchange = exact_bits(all_to_all)
    communicator = Communicator(
        size=comm.size,
        replica_index=lambda: jnp.int32(comm.rank),
        all_reduce=lambda x: all_reduce(mpi_word(x)).astype(x.dtype),
        all_to_all=exchange,
        all_gather=exact_bits(all_gather),
        reduce_scatter=partial(_exchanged_and_added, exchange),
    )
    return _of_one(communicator)


def count_bytes(comm: Communicator, f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Calls a function that talks to the other replicas, and counts the bytes that it sends.

    Args:
      comm: the communicator that the function is given.
      f: `f(comm, *args)`, a function of one replica.
      *args: its other arguments.

    Returns:
      The function's result, and the bytes that each replica sends in it: a number, or an array where they are known
      only when the program runs. They are those of the best algorithms: 2 (p − 1)/p of an array for a sum over p
      replicas.
    """
    counting = _counting(comm)
    result = f(counting, *args)
    return result, sum(counting.sent or ())


def count_aside(comm: Communicator, f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Counts as `count_bytes` does, inside another count, which leaves these bytes out; the caller adds them again.

    So a branch returns its bytes as a value of the program, and with `add_bytes` the branch taken alone is counted.
    """
    if comm.sent is None:
        return count_bytes(comm, f, *args)
    before = len(comm.sent)
    result = f(comm, *args)
    sent = sum(comm.sent[before:])
    del comm.sent[before:]
    return result, sent


def add_bytes(comm: Communicator, sent: Any) -> None:
    """Adds bytes to the count that the communicator is in, if it is in one."""
    if comm.sent is not None:
        comm.sent.append(sent)


def as_uint32(sent: Any) -> UInt32[Array, ""]:
    """Turns a count of bytes into the number that programs carry: a count known before they run is at most 2³² − 1."""
    return jnp.asarray(min(sent, MOST) if isinstance(sent, int) else sent, jnp.uint32)


def all_reduce_bytes(comm: Communicator, size: int, dtype: Any) -> int:
    """Bytes that each replica sends for the sum of `size` numbers."""
    return _sum_bytes(comm.size * comm.nodes, size * _word(comm, dtype))


def reduce_scatter_bytes(comm: Communicator, size: int, dtype: Any) -> int:
    """Bytes that each replica sends for its part of a sum of `size` numbers, which may go on between nodes."""
    nbytes = size * _word(comm, dtype)
    return -(-(comm.size - 1) * nbytes // comm.size) + _sum_bytes(comm.nodes, -(-nbytes // comm.size))


def _sum_bytes(replicas: int, nbytes: int) -> int:
    return -(-2 * (replicas - 1) * nbytes // replicas)


def _word(comm: Communicator, dtype: Any) -> int:
    """Bytes of a number as sums send it."""
    itemsize = jnp.dtype(dtype).itemsize
    return 4 if itemsize == 2 and not comm.native16 else itemsize


def mpi_word(x: jax.Array) -> jax.Array:
    """Widens 16-bit floats to float32: MPI does not know them, and a sum in float32 is more exact."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def exact_bits(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Makes a collective that only moves numbers move the bits of 16-bit floats, as MPI knows no such numbers."""

    def move(x: Array) -> Array:
        if x.dtype not in (jnp.float16, jnp.bfloat16):
            return f(x)
        return jax.lax.bitcast_convert_type(f(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    return move


def added(rows: Shaped[Array, "count n"]) -> Shaped[Array, " n"]:
    """Adds rows, one after the other: XLA:CPU takes many times as long for a sum along the first of two dims."""
    return reduce(jnp.add, list(rows))


def _of_one(comm: Communicator) -> Communicator:
    """Drops the collectives of a single replica: XLA would copy each bucket; without them it drops the packing too."""
    if comm.size > 1:
        return comm
    alone = {"all_to_all": lambda rows: rows, "all_gather": lambda x: x[None], "reduce_scatter": lambda rows: rows[0]}
    return replace(comm, all_reduce=lambda x: x, **alone)


def _exchanged_and_added(exchange: Callable[[Array], Array], rows: Array) -> Array:
    """Reduces and scatters by an exchange of the same bytes, summed in order of replicas; 16-bit floats in 32 bits."""
    return added(mpi_word(exchange(rows))).astype(rows.dtype)


def _counting(comm: Communicator) -> Communicator:
    sent = list[Any]()
    size = comm.size

    def counted(f: Callable[[Array], Array], count: Callable[[Array], int]) -> Callable[[Array], Array]:
        def call(x: Array) -> Array:
            sent.append(count(x))
            return f(x)

        return call

    return replace(
        comm,
        all_reduce=counted(comm.all_reduce, lambda x: all_reduce_bytes(comm, x.size, x.dtype)),
        all_to_all=counted(comm.all_to_all, lambda rows: rows.nbytes * (size - 1) // size),
        all_gather=counted(comm.all_gather, lambda x: x.nbytes * (size - 1)),
        reduce_scatter=counted(comm.reduce_scatter, partial(_scattered_bytes, comm)),
        sent=sent,
    )


def _scattered_bytes(comm: Communicator, rows: Array) -> int:
    # In one level 16-bit floats are sent as they are, and added in 32 bits behind the exchange.
    one = comm.nodes == 1
    return rows.nbytes * (comm.size - 1) // comm.size if one else reduce_scatter_bytes(comm, rows.size, rows.dtype)
