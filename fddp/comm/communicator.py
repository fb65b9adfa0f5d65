"""What replicas can say to each other inside a program: collectives over a mesh axis, or MPI's through mpi4jax.

Everything that travels within a program goes through a `Communicator`, which also notes how many bytes that is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped, UInt32

MOST = 2**32 - 1


@dataclass(frozen=True)
class Communicator:
    """The collectives of one replica with the others."""

    size: int
    """Number of replicas."""
    number: Callable[[], Int32[Array, ""]]
    """The number of this replica."""
    psum: Callable[[Shaped[Array, " n"]], Shaped[Array, " n"]]
    """Sum over replicas."""
    all_to_all: Callable[[Shaped[Array, "replicas n"]], Shaped[Array, "replicas n"]]
    """Row i goes to replica i; row i of the result came from replica i."""
    all_gather: Callable[[Shaped[Array, " n"]], Shaped[Array, "replicas n"]]
    """Every replica's array, on every replica."""
    native16: bool = False
    """Whether `psum` sends 16-bit floats as they are; XLA:CPU and MPI send them as 32 bits."""
    sent: list[Any] = field(default_factory=list, compare=False)
    """What was called while a program is traced: bytes that each replica sends."""


def axis_communicator(axis_name: str, size: int, platform: str) -> Communicator:
    """The collectives of XLA over one axis of a mesh.

    Args:
      axis_name: the axis.
      size: how many replicas lie along it.
      platform: of the mesh's devices: "cpu", "gpu", "cuda", "tpu".

    Returns:
      The communicator.
    """
    communicator = Communicator(
        size=size,
        number=lambda: jax.lax.axis_index(axis_name),
        psum=lambda x: jax.lax.psum(x, axis_name),
        all_to_all=lambda rows: jax.lax.all_to_all(rows, axis_name, 0, 0),
        all_gather=lambda x: jax.lax.all_gather(x, axis_name),
        native16=platform != "cpu",
    )
    return _noting(_of_one(communicator))


def mpi_communicator(comm: Any) -> Communicator:
    """The collectives of MPI, inside a program.

    Args:
      comm: an mpi4py communicator that nothing else uses.

    Returns:
      The communicator.
    """
    import mpi4jax
    from mpi4py import MPI

    communicator = Communicator(
        size=comm.size,
        number=lambda: jnp.int32(comm.rank),
        psum=lambda x: mpi4jax.allreduce(mpi_word(x), op=MPI.SUM, comm=comm).astype(x.dtype),
        all_to_all=lambda rows: mpi4jax.alltoall(rows, comm=comm),
        all_gather=lambda x: mpi4jax.allgather(x, comm=comm),
    )
    return _noting(_of_one(communicator))


def taken(comm: Communicator, f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Calls a function that talks to the other replicas, and takes what it sent out of the notes.

    Args:
      comm: what `f` talks over, itself or in other words.
      f: a function of one replica.
      *args: its arguments.

    Returns:
      What it returned, and the bytes that each replica sends in it: a number, or an array where that is known only
      when the program runs. Counted as the best algorithms do it: 2 (p − 1)/p of an array for the sum over p replicas.
    """
    before = len(comm.sent)
    result = f(*args)
    sent = sum(comm.sent[before:])
    del comm.sent[before:]
    return result, sent


def told(sent: Any) -> UInt32[Array, ""]:
    """A count of bytes as programs carry it: at most 2³² − 1."""
    return jnp.asarray(min(sent, MOST) if isinstance(sent, int) else sent, jnp.uint32)


def psum_bytes(comm: Communicator, size: int, dtype: Any) -> int:
    """What each replica sends for the sum of so many numbers."""
    itemsize = jnp.dtype(dtype).itemsize
    word = 4 if itemsize == 2 and not comm.native16 else itemsize
    return -(-2 * (comm.size - 1) * size * word // comm.size)


def mpi_word(x: jax.Array) -> jax.Array:
    """MPI knows no 16-bit floats; a sum in float32 is also the more exact one."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def _of_one(comm: Communicator) -> Communicator:
    """XLA would copy each bucket for an all-reduce of one; the sum of one is what lets it drop the packing as well."""
    if comm.size > 1:
        return comm
    return replace(comm, psum=lambda x: x, all_to_all=lambda rows: rows, all_gather=lambda x: x[None])


def _noting(comm: Communicator) -> Communicator:
    def noted(f: Callable[[Array], Array], count: Callable[[Array], int]) -> Callable[[Array], Array]:
        def call(x: Array) -> Array:
            comm.sent.append(count(x))
            return f(x)

        return call

    size = comm.size
    return replace(
        comm,
        psum=noted(comm.psum, lambda x: psum_bytes(comm, x.size, x.dtype)),
        all_to_all=noted(comm.all_to_all, lambda rows: rows.nbytes * (size - 1) // size),
        all_gather=noted(comm.all_gather, lambda x: x.nbytes * (size - 1)),
    )
