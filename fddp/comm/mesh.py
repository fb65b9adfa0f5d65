"""Replicas that are devices along one axis of a mesh; traffic is XLA's own (NCCL, Gloo or local)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt8

from fddp.comm.communicator import axis_communicator
from fddp.comm.member import EVERYWHERE, WHOLE, Bytes, Member, from_process, placed
from fddp.comm.recovery import Recovery, service_meet
from fddp.jax_internals import OVERLAP_OPTIONS, coordination_client, over_axes

# XLA would merge all buckets into one all-reduce: on CPU without any limit, on GPU up to 30 MiB. XLA:CPU drops barriers
# before it puts instructions in order, and collectives of ranks whose programs differ then come in different orders.
# Before Hopper XLA's GPU scheduler overlaps nothing unless told to.
CPU_OPTIONS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander"}
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    **OVERLAP_OPTIONS,
}


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
            return jax.tree.map(partial(placed, sharding=NamedSharding(mesh, where)), tree)
        return jax.tree.map(lambda x: placed(x, NamedSharding(mesh, spec(x))), tree)

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
            return np.asarray(copy(from_process(NamedSharding(hosts, row), data[None])))

    def send(data: Bytes, root: int) -> Bytes:
        # A broadcast as a sum of bytes to which only the root contributes: exact for any dtype.
        mine = data if jax.process_index() == hosts.devices.flat[root].process_index else np.zeros_like(data)
        with jax.disable_jit(False):
            return np.asarray(join(from_process(NamedSharding(hosts, row), mine[None])))

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
