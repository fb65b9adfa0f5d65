"""Collectives of replicas inside a program: XLA's over a mesh axis, or MPI's through mpi4jax.

All traffic inside a program goes through a `Communicator`; `count_bytes` counts its bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Shaped, UInt32

MOST = 2**32 - 1


@dataclass(frozen=True)
class Communicator:
    """The collectives of one replica with the others."""

    size: int
    """Number of replicas."""
    replica_index: Callable[[], Int32[Array, ""]]
    """Number of this replica, inside a program."""
    all_reduce: Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]
    """Sums arrays over replicas."""
    all_to_all: Callable[[Shaped[Array, "replicas n"]], Shaped[Array, "replicas n"]]
    """Sends row i to replica i; row i of the result is from replica i."""
    all_gather: Callable[[Shaped[Array, " n"]], Shaped[Array, "replicas n"]]
    """Gathers every replica's array on every replica."""
    reduce_scatter: Callable[[Shaped[Array, "replicas n"]], Shaped[Array, " n"]]
    """Sums row i over replicas, for replica i."""
    unrounded: Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]] | None = None
    """An `all_reduce` without rounding; None: `all_reduce` does not round."""
    native16: bool = False
    """True if `all_reduce` sends 16-bit floats unchanged; XLA:CPU and MPI send them as 32 bits."""
    in_lane: bool = False
    """True if messages leave in the order of the program, and copy arrays in and out themselves."""
    sent: list[Any] | None = field(default=None, compare=False)
    """Bytes of each call so far, in a list of the enclosing `count_bytes`; None outside of it."""

    @property
    def exact_sum(self) -> Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]:
        """Sums arrays without rounding, even where gradients are rounded."""
        return self.unrounded or self.all_reduce


def axis_communicator(axis_name: str, size: int, platform: str) -> Communicator:
    """Makes XLA's collectives over one axis of a mesh, for devices of a platform ("cpu", "gpu")."""

    def exchange(rows: Array) -> Array:
        return jax.lax.all_to_all(rows, axis_name, 0, 0)

    def reduce_scatter(rows: Array) -> Array:
        if platform == "cpu":  # Gloo's own reduce-scatter gives wrong numbers (jax#40830)
            return _exchanged_and_added(exchange, rows)
        return jax.lax.psum_scatter(rows, axis_name)

    communicator = Communicator(
        size=size,
        replica_index=lambda: jax.lax.axis_index(axis_name),
        all_reduce=lambda x: jax.lax.psum(x, axis_name),
        all_to_all=exchange,
        all_gather=lambda x: jax.lax.all_gather(x, axis_name),
        reduce_scatter=reduce_scatter,
        native16=platform != "cpu",
    )
    return _of_one(communicator)


def mpi_communicator(comm: Any) -> Communicator:
    """Makes MPI's collectives inside a program, on an mpi4py communicator without other users."""
    import mpi4jax
    from mpi4py import MPI

    return rank_communicator(
        comm.size,
        lambda: opaque_rank(comm.rank),
        lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm),
        partial(mpi4jax.alltoall, comm=comm),
        partial(mpi4jax.allgather, comm=comm),
    )


def opaque_rank(rank: int) -> Int32[Array, ""]:
    """Hides a rank from XLA, and from the text of a jaxpr: all ranks compile one program.

    XLA would compile other code for each constant, which rounds an equal update differently.
    """
    return jax.lax.optimization_barrier(np.full(1, rank, np.int32)).reshape(())


def rank_communicator(
    size: int,
    replica_index: Callable[[], Array],
    all_reduce: Callable[[Array], Array],
    all_to_all: Callable[[Array], Array],
    all_gather: Callable[[Array], Array],
) -> Communicator:
    """Makes the communicator of an MPI rank from three collectives without 16-bit floats."""
    exchange = exact_bits(all_to_all)
    communicator = Communicator(
        size=size,
        replica_index=replica_index,
        all_reduce=lambda x: all_reduce(mpi_word(x)).astype(x.dtype),
        all_to_all=exchange,
        all_gather=exact_bits(all_gather),
        reduce_scatter=partial(_exchanged_and_added, exchange),
    )
    return _of_one(communicator)


def count_bytes(comm: Communicator, f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Returns `f(comm, *args)` and the number of bytes that each replica sends in the call.

    The bytes are those of the best algorithms: 2 (p − 1)/p of an array for a sum over p replicas.
    They are an array if they are known only at run time.
    """
    counting = _counting(comm)
    result = f(counting, *args)
    return result, sum(counting.sent or ())


def count_aside(comm: Communicator, f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Counts like `count_bytes`, for a branch that returns the bytes as a value of its program."""
    if comm.sent is None:
        return count_bytes(comm, f, *args)
    begin = len(comm.sent)
    result = f(comm, *args)
    nbytes = sum(comm.sent[begin:])
    del comm.sent[begin:]
    return result, nbytes


def add_bytes(comm: Communicator, nbytes: int | Array) -> None:
    """Adds bytes to the enclosing count, if the communicator is inside one."""
    if comm.sent is not None:
        comm.sent.append(nbytes)


def as_uint32(nbytes: int | Array) -> UInt32[Array, ""]:
    """Converts a count of bytes into a program's number; a Python number is capped at 2³² − 1."""
    if isinstance(nbytes, int):
        nbytes = min(nbytes, MOST)
    return jnp.asarray(nbytes, jnp.uint32)


def more_sent(sent: UInt32[Array, "*messages"], nbytes: Any) -> UInt32[Array, "*messages"]:
    """Adds to a number of bytes, and saturates at 32 bits.

    >>> int(more_sent(jnp.uint32(7), 2**40)) == MOST
    True
    """
    return sent + jnp.minimum(as_uint32(nbytes), jnp.uint32(MOST) - sent)


def all_reduce_bytes(comm: Communicator, size: int, dtype: DTypeLike) -> int:
    """Returns the bytes that each replica sends for the sum of `size` numbers."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 2 and not comm.native16:
        itemsize = 4
    return -(-2 * (comm.size - 1) * size * itemsize // comm.size)


def mpi_word(x: jax.Array) -> jax.Array:
    """Widens 16-bit floats to float32: MPI has no such dtype, and float32 sums are more exact."""
    if x.dtype in (jnp.float16, jnp.bfloat16):
        return x.astype(jnp.float32)
    return x


def exact_bits(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Makes a collective without arithmetic move 16-bit floats as integers, for MPI's sake."""

    def move(x: Array) -> Array:
        if x.dtype not in (jnp.float16, jnp.bfloat16):
            return f(x)
        return jax.lax.bitcast_convert_type(f(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    return move


def add_rows(rows: Shaped[Array, "count n"]) -> Shaped[Array, " n"]:
    """Adds rows one by one: XLA:CPU is many times slower at a sum along the first of two dims."""
    return reduce(jnp.add, list(rows))


def _of_one(comm: Communicator) -> Communicator:
    """Drops the collectives of a single replica: with them XLA would copy and pack each bucket."""
    if comm.size > 1:
        return comm
    identities = {
        "all_to_all": lambda rows: rows,
        "all_gather": lambda x: x[None],
        "reduce_scatter": lambda rows: rows[0],
    }
    return replace(comm, all_reduce=lambda x: x, **identities)


def _exchanged_and_added(exchange: Callable[[Array], Array], rows: Array) -> Array:
    """Reduce-scatters by an all-to-all of the same bytes, and a sum in order of replicas."""
    return add_rows(mpi_word(exchange(rows))).astype(rows.dtype)


def _counting(comm: Communicator) -> Communicator:
    counts = list[Any]()
    size = comm.size

    def counted(
        f: Callable[[Array], Array], count: Callable[[Array], int]
    ) -> Callable[[Array], Array]:
        def call(x: Array) -> Array:
            counts.append(count(x))
            return f(x)

        return call

    def bytes_of_rows(rows: Array) -> int:
        return rows.nbytes * (size - 1) // size

    return replace(
        comm,
        all_reduce=counted(comm.all_reduce, lambda x: all_reduce_bytes(comm, x.size, x.dtype)),
        all_to_all=counted(comm.all_to_all, bytes_of_rows),
        all_gather=counted(comm.all_gather, lambda x: x.nbytes * (size - 1)),
        reduce_scatter=counted(comm.reduce_scatter, bytes_of_rows),
        sent=counts,
    )
