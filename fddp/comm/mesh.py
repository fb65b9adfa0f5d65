"""Groups of replicas along one axis of a mesh; XLA carries their traffic (NCCL, Gloo or local)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt8

from fddp.comm.communicator import axis_communicator
from fddp.comm.group import Group
from fddp.comm.lane_thread import library
from fddp.comm.mesh_programs import first_devices, mesh_placement
from fddp.comm.placement import AXIS, REPLICATED, from_process
from fddp.comm.program_lane import mesh_lanes
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.jax_internals import context_mesh, without_context_mesh
from fddp.wording import check_has


def mesh_group(mesh: Mesh, axis_name: str = AXIS) -> Group:
    """Makes a group of the replicas along one axis of the user's own mesh.

    If the mesh has other axes, a replica is all devices at one position of the axis. The parameters
    of `step.init` stay placed along the other axes by the user (tensor parallelism): XLA partitions
    the loss as under `jax.jit`. Gradients are summed over this axis only, and each device sends its
    own parts.

    Args:
      mesh: a mesh over devices of one or several processes.
      axis_name: the axis of the replicas.

    Returns:
      The group.

    Raises:
      ValueError: the mesh has no such axis, or a replica is spread over several processes.

    Example:
      >>> import jax, fddp
      >>> fddp.mesh_group(jax.sharding.Mesh(jax.devices(), "replica")).size == jax.device_count()
      True
    """
    check_has("axis_names", "mesh_group: mesh", mesh, "a jax.sharding.Mesh")
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, none is {axis_name!r}."
        )
    owners = _replica_owners(mesh, axis_name)
    processes = list(dict.fromkeys(owners))
    if jax.process_index() not in processes:
        raise ValueError(
            f"the mesh has devices of processes {sorted(processes)}, none of this one, "
            f"{jax.process_index()}: only processes with devices of the mesh can create a group "
            "of it."
        )
    platform = mesh.devices.flat[0].platform

    placement = mesh_placement(mesh, axis_name)
    backend = "nccl"
    if len(processes) == 1:
        backend = "local"
    elif platform == "cpu":
        backend = "gloo"
    communicator = axis_communicator(axis_name, mesh.shape[axis_name], platform)
    hosts = mesh_hosts(mesh)
    rank = processes.index(jax.process_index())
    in_lanes = None
    if backend == "gloo" and mesh.size == len(processes) and library():
        in_lanes = mesh_lanes(placement, rank, hosts)
    owner_ranks = [processes.index(process) for process in owners]
    return Group(
        rank=rank,
        size=mesh.shape[axis_name],
        backend=backend,
        placement=placement,
        communicator=communicator,
        transport=Transport(in_lanes),
        hosts=hosts,
        make_subgroup=partial(_subgroup, mesh, axis_name, owner_ranks),
    )


def _subgroup(
    mesh: Mesh, axis_name: str, owner_ranks: Sequence[int], ranks: Sequence[int]
) -> Group:
    """Makes the group of the replicas of some ranks, rank by rank."""
    positions = [k for rank in ranks for k, owner in enumerate(owner_ranks) if owner == rank]
    devices = np.take(mesh.devices, positions, mesh.axis_names.index(axis_name))
    return mesh_group(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), axis_name)


def _replica_owners(mesh: Mesh, axis_name: str) -> list[int]:
    """Returns the process of each replica; raises ValueError if a replica has several."""
    axis = mesh.axis_names.index(axis_name)
    replicas = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.shape[axis_name], -1)
    owners = list[int]()
    for number, replica in enumerate(replicas):
        process, *more = sorted({device.process_index for device in replica})
        if more:
            raise ValueError(
                f"replica {number} of the axis {axis_name!r} is spread over processes "
                f"{[process, *more]}, and a process supplies the rows of whole replicas: place "
                "the other axes of the mesh inside processes."
            )
        owners.append(process)
    return owners


def world_group(devices: Sequence[Any]) -> Group:
    """Makes the group of all replicas, on the context mesh if it has one axis and these devices."""
    mesh = context_mesh()
    if len(mesh.axis_names) != 1 or set(mesh.devices.flat) != set(devices):
        mesh = replica_mesh(devices)
    processes = [device.process_index for device in mesh.devices.flat]
    if processes != sorted(processes):  # ranks follow the launcher's numbers
        mesh = Mesh(np.array(devices), mesh.axis_names, axis_types=mesh.axis_types)
    return mesh_group(mesh, mesh.axis_names[0])


def replica_mesh(devices: Sequence[Any]) -> Mesh:
    """Makes a mesh of one axis over devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_hosts(mesh: Mesh) -> Hosts:
    """Makes the collectives of a mesh's processes, over one device of each."""
    hosts = Mesh(first_devices(mesh), ("process",))
    row = PartitionSpec("process")
    copy = jax.jit(lambda rows: rows, out_shardings=NamedSharding(hosts, REPLICATED))
    join = jax.jit(
        jax.shard_map(
            lambda rows: jax.lax.psum(rows[0], "process"),
            mesh=hosts,
            in_specs=row,
            out_specs=REPLICATED,
        )
    )

    @without_context_mesh
    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        with jax.disable_jit(False):  # without jit a host cannot read another host's rows
            return np.asarray(copy(from_process(NamedSharding(hosts, row), data[None])))

    @without_context_mesh
    def broadcast(data: Bytes, root: int) -> Bytes:
        # A broadcast is a sum of bytes to which only the root contributes: exact for any dtype.
        summand = data
        if jax.process_index() != hosts.devices.flat[root].process_index:
            summand = np.zeros_like(data)
        with jax.disable_jit(False):
            return np.asarray(join(from_process(NamedSharding(hosts, row), summand[None])))

    ranks = tuple(device.process_index for device in hosts.devices.flat)
    return Hosts(ranks, all_gather, broadcast)
