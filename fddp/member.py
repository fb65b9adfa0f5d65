"""How one process takes part in a group: as devices of a mesh, or as a rank of MPI.

A `Member` is a few functions. Everything above is written once, per replica, against them: `program` turns a function
of one replica into a program that runs on all of them, and `communicator` is what they say to each other inside it;
`reduce` adds between programs; `place` brings a process's own arrays to where programs take them; `gather` and `send`
move bytes between the hosts themselves.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt8

from fddp.communicator import Communicator, axis_communicator, mpi_communicator, mpi_word
from fddp.failure import Recovery, mpi_meet, service_meet
from fddp.jax_internals import OVERLAP_OPTIONS, asked_for, coordination_client, over_axes
from fddp.landing import landing

# Where an argument or a result of a replica's function lives: equal on all replicas, or each replica's own rows.
EVERYWHERE = PartitionSpec()
# What a replica of one device sees of the mesh.
WHOLE = AbstractMesh((), ())
Bytes: TypeAlias = UInt8[np.ndarray, " n"]

MESSAGES = 4
FIRST_WAIT_S, LONGEST_WAIT_S = 2e-5, 5e-4

# XLA would merge all buckets into one all-reduce: on CPU without any limit, on GPU up to 30 MiB. XLA:CPU drops barriers
# before it puts instructions in order, and collectives of ranks whose programs differ then come in different orders.
# Before Hopper XLA's GPU scheduler overlaps nothing unless told to.
CPU_OPTIONS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander"}
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    **OVERLAP_OPTIONS,
}


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


def mesh_member(mesh: Mesh, axis_name: str) -> Member:
    """A member whose replicas are the devices along one axis of a mesh; traffic is XLA's own (NCCL, Gloo or local).

    Args:
      mesh: devices of one or several processes.
      axis_name: the axis over which replicas lie; along the other axes lie the devices of each.

    Returns:
      The member.
    """
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    own = PartitionSpec(axis_name)
    hosts = Mesh(_first_devices(mesh), ("process",))
    platform = mesh.devices.flat[0].platform
    options = CPU_OPTIONS if platform == "cpu" else GPU_OPTIONS
    single = mesh.shape[axis_name] == mesh.size  # a replica is one device
    view = WHOLE if single else mesh.abstract_mesh.update_axis_types({axis_name: AxisType.Manual})

    def spec(x: Any) -> PartitionSpec:
        sharding = getattr(x, "sharding", None)
        if single or not isinstance(sharding, NamedSharding) or not _same_devices(sharding.mesh, mesh):
            return EVERYWHERE
        entries = [_without(entry, axis_name) for entry in sharding.spec]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
        # check_vma=False: gradients stay each replica's own until we sum them; XLA must not do it leaf by leaf.
        spread = over_axes(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis_name})
        # Several devices of a replica hold what `place` gave them. Where results lie is said too: of arrays without
        # elements XLA finds that they are equal everywhere, and the next program would not take them.
        specs = {"in_shardings": in_specs, "out_shardings": out_specs} if single else {}
        places: Any = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.jit(spread, **places, donate_argnums=tuple(donate), compiler_options=options)

    def place(tree: Any, where: PartitionSpec) -> Any:
        if single or where != EVERYWHERE:
            return jax.tree.map(partial(_placed, sharding=NamedSharding(mesh, where)), tree)
        return jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, spec(x))), tree)

    def feed(rows: Any) -> Any:
        # A program takes the host's arrays by itself, and ten times faster, unless other processes hold some of them.
        if single and NamedSharding(mesh, own).is_fully_addressable and not _committed(rows):
            return rows
        return place(rows, own)

    row = PartitionSpec("process")
    copy = jax.jit(lambda rows: rows, out_shardings=NamedSharding(hosts, EVERYWHERE))
    join = jax.jit(
        jax.shard_map(lambda rows: jax.lax.psum(rows[0], "process"), mesh=hosts, in_specs=row, out_specs=EVERYWHERE)
    )

    def gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        with jax.disable_jit(False):  # operation by operation no host sees what another has
            return np.asarray(copy(_from_process(NamedSharding(hosts, row), data[None])))

    def send(data: Bytes, root: int) -> Bytes:
        # A broadcast as a sum of bytes to which only the root contributes: exact for any dtype.
        mine = data if jax.process_index() == hosts.devices.flat[root].process_index else np.zeros_like(data)
        with jax.disable_jit(False):
            return np.asarray(join(_from_process(NamedSharding(hosts, row), mine[None])))

    communicator = axis_communicator(axis_name, mesh.shape[axis_name], platform)
    total = program(communicator.psum, (own,), EVERYWHERE)

    return Member(
        axis_name=axis_name,
        own=own,
        share=mesh.shape[axis_name],
        # With several steps under way XLA:CPU's threads all wait in all-reduces for devices that have none left.
        crowded=platform == "cpu" and mesh.size > len(_first_devices(mesh)),
        view=view,
        spec=spec,
        program=program,
        communicator=communicator,
        reduce=lambda x: jax.block_until_ready(total(x)) if communicator.size > 1 else x,
        place=place,
        feed=feed,
        gather=gather,
        send=send,
        recovery=Recovery(service_meet(coordination_client, [x.process_index for x in hosts.devices.flat])),
    )


def mpi_member(comm: Any) -> Member:
    """A member that is one rank of an MPI communicator, with one device; traffic goes through mpi4jax.

    Args:
      comm: an mpi4py communicator. It is cloned, so that the messages inside of programs (mpi4jax), those between
        programs, those of the hosts and the user's own never meet.

    Returns:
      The member.
    """
    from mpi4py import MPI

    wire, hosts, between = comm.Clone(), comm.Clone(), comm.Clone()
    device, like = jax.local_devices()[0], landing()
    here = jax.sharding.SingleDeviceSharding(device)

    def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
        del in_specs, out_specs  # one device a process: equal everywhere and its own are the same array
        return jax.jit(f, donate_argnums=tuple(donate))

    def reduce(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        # mpi4jax's own call spins on a core that the backward pass needs; MPI's nonblocking call, asked less and less
        # often, leaves it free. In several messages one is on the wire while another is being added up.
        sent = jax.device_get(mpi_word(x))
        received = like(sent)
        parts = zip(np.array_split(sent, MESSAGES), np.array_split(received, MESSAGES))
        requests = [between.Iallreduce(mine, total, op=MPI.SUM) for mine, total in parts]
        wait = FIRST_WAIT_S
        while not MPI.Request.Testall(requests):
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        return jax.device_put(received, device).astype(x.dtype)

    def place(tree: Any, spec: PartitionSpec) -> Any:
        del spec
        return jax.tree.map(partial(_placed, sharding=here), tree)

    def gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        rows = np.empty((hosts.size, data.size), np.uint8)
        hosts.Allgather(np.ascontiguousarray(data), rows)
        return rows

    def send(data: Bytes, root: int) -> Bytes:
        data = np.array(data)
        hosts.Bcast(data, root=root)
        return data

    return Member(
        axis_name=None,
        own=EVERYWHERE,
        share=1,
        crowded=False,
        view=WHOLE,
        spec=lambda x: EVERYWHERE,
        program=program,
        communicator=mpi_communicator(wire),
        reduce=reduce,
        place=place,
        feed=lambda rows: rows,
        gather=gather,
        send=send,
        recovery=Recovery(mpi_meet(comm.Clone())),
    )


def _first_devices(mesh: Mesh) -> list[Any]:
    """One device of each process, in the order of the mesh."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return list(first.values())


def _same_devices(mesh: Any, other: Mesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.shape == other.shape and bool(np.all(mesh.devices == other.devices))


def _without(entry: Any, axis_name: str) -> Any:
    """What stays of an entry of a spec, when an array is to be equal along an axis."""
    if isinstance(entry, tuple):
        return tuple(axis for axis in entry if axis != axis_name) or None
    return None if entry == axis_name else entry


def _committed(tree: Any) -> bool:
    """Whether the user has put some of these arrays on a device of his choice."""
    return any(isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(tree))


def _placed(x: Any, sharding: jax.sharding.Sharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and x.sharding == sharding):
        return x
    if not hasattr(x, "dtype"):  # a number of Python's
        x = np.asarray(x, jnp.result_type(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _from_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return _from_process(sharding, x)


def _from_process(sharding: jax.sharding.Sharding, x: Any) -> jax.Array:
    """This process's part of an array over several, as a transfer that is asked for."""
    with asked_for():
        return jax.make_array_from_process_local_data(sharding, np.asarray(jax.device_get(x)))
