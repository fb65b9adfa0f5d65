"""How one process takes part in a group: as devices of a mesh, or as a rank of MPI.

A `Member` is a few functions. Everything above is written once, per replica, against them: `program` turns a function
of one replica into a program that runs on all of them, and `communicator` is what they say to each other inside it;
`reduce` adds between programs; `place` brings a process's own arrays to where programs take them; `gather` and `send`
move bytes between the hosts themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import UInt8

from fddp.comm.communicator import Communicator
from fddp.comm.recovery import Recovery
from fddp.jax_internals import ClosedJaxpr, asked_for

# Where an argument or a result of a replica's function lives: equal on all replicas, or each replica's own rows.
EVERYWHERE = PartitionSpec()
# What a replica of one device sees of the mesh.
WHOLE = AbstractMesh((), ())
Bytes: TypeAlias = UInt8[np.ndarray, " n"]


class Member(NamedTuple):
    """What a group's programs and messages are carried by."""

    axis_name: str | None
    """Name of the mesh axis for collectives inside a loss; None where there is no mesh."""
    own: PartitionSpec
    """Spec of what every replica has for itself: concatenated over replicas along dim 0."""
    share: int
    """Of how many replicas such an array holds the rows."""
    crowded: bool
    """Whether several devices of this process share its cores: one step must then end before the next begins."""
    view: AbstractMesh
    """The mesh as the function of a replica of several devices sees it: XLA partitions along the other axes."""
    spec: Callable[[Any], PartitionSpec]
    """Where the parts of an array lie along those axes, as its user placed it."""
    program: Callable[..., jax.stages.Wrapped]
    """`program(f, in_specs, out_specs, donate=())`: compiles `f`, a function of one replica, for all of them."""
    communicator: Communicator
    """What replicas say to each other inside a program."""
    reduce: Callable[[jax.Array], jax.Array]
    """Sum over replicas, between programs: of what each has for itself, flat; blocks the calling thread."""
    place: Callable[[Any, PartitionSpec], Any]
    """`place(tree, spec)`: this process's arrays (its own rows, for `own`) as arguments of a program."""
    feed: Callable[[Any], Any]
    """This process's rows as arguments of one program; `place` is for what several programs read, and dearer."""
    gather: Callable[[Bytes], UInt8[np.ndarray, "processes n"]]
    """Equally many bytes from every process, on every process."""
    send: Callable[[Bytes, int], Bytes]
    """`send(data, root)`: root's bytes, on every process."""
    recovery: Recovery
    """What becomes of the next step after an error inside one."""
    lanes: "tuple[Member, ...]" = ()
    """Members whose `reduce` may run side by side, each bucket on the next; none: this one alone."""


def trace(member: Member, f: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of a function of one replica, and the shapes of what it returns; nothing runs."""
    axes = [(member.axis_name, member.share)] if member.axis_name else None
    with jax.sharding.use_abstract_mesh(member.view):
        return jax.make_jaxpr(f, axis_env=axes, return_shape=True)(*args)


def lifted(tree: Any) -> Any:
    """What a replica has for itself, as it crosses a program's border: with a first dim, along which replicas lie."""
    return jax.tree.map(lambda x: x[None], tree)


def lowered(tree: Any) -> Any:
    """The inverse of `lifted`."""
    return jax.tree.map(lambda x: x[0], tree)


def placed(x: Any, sharding: jax.sharding.Sharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and x.sharding == sharding):
        return x
    if not hasattr(x, "dtype"):  # a number of Python's
        x = np.asarray(x, jnp.result_type(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = from_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return from_process(sharding, x)


def from_process(sharding: jax.sharding.Sharding, x: Any) -> jax.Array:
    """This process's part of an array over several, as a transfer that is asked for."""
    with asked_for():
        return jax.make_array_from_process_local_data(sharding, np.asarray(jax.device_get(x)))
