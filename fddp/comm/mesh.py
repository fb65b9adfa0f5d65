"""Groups of replicas that are devices along one axis of a mesh; traffic is XLA's own (NCCL, Gloo or local)."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt8

from fddp.comm.by_level import ByLevel
from fddp.comm.chunked_collectives import GLOO_BYTES, gathered, scattered
from fddp.comm.communicator import Communicator, axis_communicator
from fddp.comm.group import Group
from fddp.comm.lane import Lane
from fddp.comm.levels import Levels, Nodes, hosts_of, in_two_levels, same_places
from fddp.comm.mesh_programs import first_devices, mesh_placement
from fddp.comm.placement import AXIS, REPLICATED, Placement, from_process
from fddp.comm.recovery import Recovery, service_meet
from fddp.comm.summation_tree import tree_reduce
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.jax_internals import context_mesh, coordination_client, on_mesh, without_context_mesh
from fddp.wording import check_has


def mesh_group(mesh: Mesh, axis_name: str = AXIS) -> Group:
    """Makes a group of the replicas along one axis of the user's own mesh.

    Where the mesh has other axes, a replica is all devices at one place of the axis, and the parameters of `step.init`
    stay placed along them as the user placed them (tensor parallelism): XLA partitions the loss as under `jax.jit`,
    and gradients are summed over this axis alone, each device sending the parts that it holds.

    Args:
      mesh: a mesh over devices of one or several processes.
      axis_name: the axis over which replicas lie.

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
        raise ValueError(f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, none is {axis_name!r}.")
    axis = mesh.axis_names.index(axis_name)
    replicas = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.shape[axis_name], -1)
    owners = [{device.process_index for device in replica} for replica in replicas]
    for number, found in enumerate(owners):
        if len(found) > 1:
            raise ValueError(
                f"replica {number} of the axis {axis_name!r} is spread over processes {sorted(found)}, and a process "
                "brings the rows of whole replicas: let the other axes of the mesh lie inside of processes."
            )
    owner = [process for (process,) in owners]
    processes = list(dict.fromkeys(owner))
    if jax.process_index() not in processes:
        raise ValueError(
            f"the mesh has devices of processes {sorted(processes)}, none of this one, {jax.process_index()}: only "
            "those that take part make a group of it."
        )
    platform = mesh.devices.flat[0].platform

    def make_subgroup(ranks: Sequence[int]) -> Group:
        chosen = [at for rank in ranks for at, process in enumerate(owner) if process == processes[rank]]
        devices = np.take(mesh.devices, chosen, axis)
        return mesh_group(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), axis_name)

    def clone(count: int) -> tuple[Transport, ...]:
        # Programs of several threads may reach the devices of one process in different orders, and then wait for each
        # other for ever: such a process has one transport.
        turns = min(count, len(processes)) if len(processes) == mesh.size else 1
        return tuple(_turned(mesh, axis_name, piece, turn) if turn else transport for turn in range(turns))

    placement = mesh_placement(mesh, axis_name)
    piece = GLOO_BYTES if platform == "cpu" and len(processes) > 1 else None
    communicator = axis_communicator(axis_name, mesh.shape[axis_name], platform)
    transport = mesh_transport(placement, communicator, piece)
    hosts = mesh_hosts(mesh)
    places = [processes.index(process) for process in owner]
    return Group(
        rank=processes.index(jax.process_index()),
        processes=len(processes),
        size=mesh.shape[axis_name],
        backend="local" if len(processes) == 1 else "gloo" if platform == "cpu" else "nccl",
        global_ranks=tuple(processes),
        placement=placement,
        communicator=communicator,
        transport=transport,
        hosts=hosts,
        recovery=Recovery(service_meet(coordination_client, [x.process_index for x in first_devices(mesh)])),
        make_subgroup=make_subgroup,
        clone=clone,
        lane=_lane(frozenset(mesh.devices.flat)),
        levels=mesh_levels(placement, communicator, platform, partial(hosts_of, hosts, places), piece),
    )


@functools.cache
def _lane(devices: frozenset[Any]) -> Lane:
    """Gives one lane for the same devices, however many groups are made of them, as XLA has one Gloo communicator."""
    del devices
    return Lane()


def world_group(devices: Sequence[Any]) -> Group:
    """Makes the group of all replicas: on the mesh that is set, if it has one axis and these devices."""
    mesh = context_mesh()
    if len(mesh.axis_names) != 1 or set(mesh.devices.flat) != set(devices):
        mesh = replica_mesh(devices)
    processes = [device.process_index for device in mesh.devices.flat]
    if processes != sorted(processes):  # ranks have the order in which launchers number processes
        mesh = Mesh(np.array(devices), mesh.axis_names, axis_types=mesh.axis_types)
    return mesh_group(mesh, mesh.axis_names[0])


def replica_mesh(devices: Sequence[Any]) -> Mesh:
    """Makes a mesh of one axis over devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_transport(
    placement: Placement,
    communicator: Communicator,
    piece: int | None = None,
    turn: int = 0,
    *,
    alike: PartitionSpec = REPLICATED,
) -> Transport:
    """Makes collectives between programs, which are small programs themselves.

    Args:
      placement: the placement from `mesh_placement`.
      communicator: a communicator over the same axis.
      piece: bytes to each replica that are scattered or gathered at once; None: all.
      turn: number of places by which the replicas' order is rotated; an all-gather gives the order of turn 0.
      alike: spec of what comes to all that speak with each other: per replica where others speak of something else.

    Returns:
      The transport.
    """

    def blocking(
        f: Callable[[jax.Array], jax.Array], out: PartitionSpec, blocks: int = 1
    ) -> Callable[[jax.Array], jax.Array]:
        program = placement.program(f, (placement.per_replica,), out)
        alone = placement.axis_size * blocks == 1
        return lambda x: x if alone else jax.block_until_ready(program(x))

    @functools.cache
    def in_tree(blocks: int) -> Callable[[jax.Array], jax.Array]:
        return blocking(lambda x: tree_reduce(communicator, x, blocks), alike, blocks)

    return Transport(
        all_reduce=blocking(communicator.all_reduce, alike),
        reduce_scatter=blocking(
            lambda x: scattered(communicator, x.reshape(communicator.size, -1), piece), placement.per_replica
        ),
        all_gather=blocking(lambda x: jnp.roll(gathered(communicator, x, piece), turn, 0).reshape(-1), alike),
        tree_reduce=lambda x, blocks: in_tree(blocks)(x),
        inside=communicator,
    )


def mesh_levels(
    placement: Placement,
    communicator: Communicator,
    platform: str,
    find: Callable[[], Sequence[Any]],
    piece: int | None = None,
) -> Levels:
    """Makes the levels of replicas along an axis, which sum over nodes first.

    Args:
      placement: the placement from `mesh_placement`.
      communicator: a communicator over the same axis.
      platform: platform of its devices.
      find: finds the node of each replica.
      piece: bytes to each replica that are scattered or gathered at once; None: all.

    Returns:
      The levels.
    """

    def transport(communicator: Communicator, alike: PartitionSpec = REPLICATED) -> Transport:
        return mesh_transport(placement, communicator, piece, alike=alike)

    def make(
        nodes: Nodes, neighbours: Nodes | None = None
    ) -> tuple[Communicator, Callable[[int], tuple[Transport, ...]]]:
        several = [
            axis_communicator(str(placement.axis_name), len(among[0]), platform, among=among)
            for among in (nodes, same_places(nodes), neighbours)
            if among
        ]
        both = in_two_levels(communicator, *several)
        own = placement.per_replica
        shards = transport(both.at("shards"))
        one = transport(both)._replace(levels=ByLevel(shards, *(transport(some, own) for some in several)))
        # There is one transport: devices in another order are the same nodes, and two sums at once would mix there.
        return both, lambda count: (one,)

    return Levels(find, make)


def mesh_hosts(mesh: Mesh) -> Hosts:
    """Makes the collectives of a mesh's processes, over one device of each.

    Args:
      mesh: devices of one or several processes.

    Returns:
      The hosts.
    """
    hosts = Mesh(first_devices(mesh), ("process",))
    row = PartitionSpec("process")
    copy = jax.jit(lambda rows: rows, out_shardings=NamedSharding(hosts, REPLICATED))
    join = jax.jit(
        jax.shard_map(lambda rows: jax.lax.psum(rows[0], "process"), mesh=hosts, in_specs=row, out_specs=REPLICATED)
    )

    @without_context_mesh
    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        with jax.disable_jit(False):  # without jit no host sees what another has
            return np.asarray(copy(from_process(NamedSharding(hosts, row), data[None])))

    @without_context_mesh
    def broadcast(data: Bytes, root: int) -> Bytes:
        # A broadcast as a sum of bytes to which only the root contributes: exact for any dtype.
        mine = data if jax.process_index() == hosts.devices.flat[root].process_index else np.zeros_like(data)
        with jax.disable_jit(False):
            return np.asarray(join(from_process(NamedSharding(hosts, row), mine[None])))

    return Hosts(all_gather, broadcast)


def _turned(mesh: Mesh, axis_name: str, piece: int | None, turn: int) -> Transport:
    """Makes a transport over the same devices in a rotated order.

    XLA keeps one Gloo communicator for each order of devices, and on one communicator two sums at once mix, without an
    error. A sum of floats may differ in its last bits from that in another order; all ranks get the same bits.
    """
    devices = np.roll(mesh.devices.reshape(-1), -turn).reshape(mesh.devices.shape)
    ring = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    placement = mesh_placement(ring, axis_name)
    communicator = axis_communicator(axis_name, mesh.shape[axis_name], mesh.devices.flat[0].platform)
    other = mesh_transport(placement, communicator, piece, turn)

    def turned(collective: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: on_mesh(collective(on_mesh(x, ring)), mesh)

    # A reduce-scatter gives each replica its own part, so it keeps the mesh's own order.
    own = mesh_transport(mesh_placement(mesh, axis_name), communicator, piece)
    return own._replace(all_reduce=turned(other.all_reduce), all_gather=turned(other.all_gather))
