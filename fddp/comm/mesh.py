"""Replicas that are devices along one axis of a mesh; traffic is XLA's own (NCCL, Gloo or local)."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt8

from fddp.comm.communicator import Communicator, axis_communicator
from fddp.comm.group import Group
from fddp.comm.levels import Levels, Nodes, hosts_of, in_two_levels, same_places
from fddp.comm.placement import REPLICATED, WHOLE, Placement, from_process, held_alike, placed, placed_alike
from fddp.comm.recovery import Recovery, service_meet
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.comm.tree import tree_reduce
from fddp.jax_internals import OVERLAP_OPTIONS, coordination_client, over_axes

AXIS = "replica"

# XLA would merge all buckets into one all-reduce: on CPU without any limit, on GPU up to 30 MiB. XLA:CPU drops barriers
# before it puts instructions in order, and collectives of ranks whose programs differ then come in different orders.
# Before Hopper XLA's GPU scheduler overlaps nothing unless told to.
CPU_OPTIONS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander"}
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    **OVERLAP_OPTIONS,
}


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
        # Several devices of a process, reached by programs of several threads in different orders, wait for each other.
        turns = min(count, len(processes)) if len(processes) == mesh.size else 1
        return tuple(_turned(mesh, axis_name, turn) if turn else transport for turn in range(turns))

    placement = mesh_placement(mesh, axis_name)
    communicator = axis_communicator(axis_name, mesh.shape[axis_name], platform)
    transport, hosts = mesh_transport(placement, communicator), mesh_hosts(mesh)
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
        recovery=Recovery(service_meet(coordination_client, [x.process_index for x in _first_devices(mesh)])),
        make_subgroup=make_subgroup,
        clone=clone,
        levels=mesh_levels(placement, communicator, platform, partial(hosts_of, hosts, places)),
    )


def replica_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of one axis over devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_placement(mesh: Mesh, axis_name: str) -> Placement:
    """Replicas along one axis of a mesh.

    Args:
      mesh: devices of one or several processes.
      axis_name: the axis over which replicas lie; along the other axes lie the devices of each.

    Returns:
      The placement.
    """
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    per_replica = PartitionSpec(axis_name)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = CPU_OPTIONS if on_cpu else GPU_OPTIONS
    single = mesh.shape[axis_name] == mesh.size  # a replica is one device
    sharding = functools.cache(partial(NamedSharding, mesh))
    fed_by_programs = single and sharding(per_replica).is_fully_addressable
    view = WHOLE if single else mesh.abstract_mesh.update_axis_types({axis_name: AxisType.Manual})

    def spec(x: Any) -> PartitionSpec:
        own = getattr(x, "sharding", None)
        if single or not isinstance(own, NamedSharding) or not _same_devices(own.mesh, mesh):
            return REPLICATED
        entries = [_without(entry, axis_name) for entry in own.spec]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
        # check_vma=False: gradients stay each replica's own until we sum them; XLA must not do it leaf by leaf.
        spread = over_axes(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis_name})
        # Several devices of a replica hold what `place` gave them. Where results lie is said too: of arrays without
        # elements XLA finds that they are equal everywhere, and the next program would not take them.
        specs = {"in_shardings": in_specs, "out_shardings": out_specs} if single else {}
        places: Any = jax.tree.map(sharding, specs)
        return jax.jit(spread, **places, donate_argnums=tuple(donate), compiler_options=options)

    def place(tree: Any, where: PartitionSpec) -> Any:
        if single or where != REPLICATED:
            return placed_alike(tree, sharding(where))
        return jax.tree.map(lambda x: placed(x, sharding(spec(x))), tree)

    def feed(rows: Any) -> Any:
        # A program takes the host's arrays by itself, and ten times faster, unless other processes hold some of them.
        if fed_by_programs and not _committed(rows):
            return rows
        return place(rows, per_replica)

    def together(arrays: Sequence[Any], where: PartitionSpec) -> Any:
        (first, *more), times = arrays[0].shape or (1,), 1 if where == REPLICATED else mesh.shape[axis_name]
        shape = (times * first, *more) if arrays[0].shape else ()
        return jax.make_array_from_single_device_arrays(shape, sharding(where), list(arrays))

    return Placement(
        axis_name=axis_name,
        per_replica=per_replica,
        replicas_in_array=mesh.shape[axis_name],
        # With several steps under way XLA:CPU's threads all wait in all-reduces for devices that have none left.
        shares_cores=on_cpu and mesh.size > len(_first_devices(mesh)),
        view=view,
        spec=spec,
        program=program,
        place=place,
        holds=partial(held_alike, sharding(REPLICATED)) if single else lambda arrays: False,
        each=lambda x: tuple(shard.data for shard in x.addressable_shards),
        together=together,
        feed=feed,
    )


def mesh_transport(placement: Placement, communicator: Communicator) -> Transport:
    """Collectives between programs that are small programs themselves.

    Args:
      placement: from `mesh_placement`.
      communicator: over the same axis.

    Returns:
      The transport.
    """

    def blocking(
        f: Callable[[jax.Array], jax.Array], out: PartitionSpec, blocks: int = 1
    ) -> Callable[[jax.Array], jax.Array]:
        program, alone = placement.program(f, (placement.per_replica,), out), communicator.size * blocks == 1
        return lambda x: x if alone else jax.block_until_ready(program(x))

    @functools.cache
    def in_tree(blocks: int) -> Callable[[jax.Array], jax.Array]:
        return blocking(lambda x: tree_reduce(communicator, x, blocks), REPLICATED, blocks)

    return Transport(
        all_reduce=blocking(communicator.all_reduce, REPLICATED),
        reduce_scatter=blocking(
            lambda x: communicator.reduce_scatter(x.reshape(communicator.size, -1)), placement.per_replica
        ),
        all_gather=blocking(lambda x: communicator.all_gather(x).reshape(-1), REPLICATED),
        tree_reduce=lambda x, blocks: in_tree(blocks)(x),
    )


def mesh_levels(
    placement: Placement, communicator: Communicator, platform: str, find: Callable[[], Sequence[Any]]
) -> Levels:
    """How replicas along an axis sum in two levels.

    Args:
      placement: from `mesh_placement`.
      communicator: over the same axis.
      platform: of its devices.
      find: finds the node of each replica.

    Returns:
      The levels.
    """

    def make(nodes: Nodes) -> tuple[Communicator, Callable[[int], tuple[Transport, ...]]]:
        node, network = (
            axis_communicator(str(placement.axis_name), len(among[0]), platform, among=among)
            for among in (nodes, same_places(nodes))
        )
        both = in_two_levels(communicator, node, network)
        transport = mesh_transport(placement, both)
        # One lane: devices in another order are the same nodes, and two sums at once would mix there.
        return both, lambda count: (transport,)

    return Levels(find, make)


def mesh_hosts(mesh: Mesh) -> Hosts:
    """Collectives of the processes of a mesh, over one device of each.

    Args:
      mesh: devices of one or several processes.

    Returns:
      The hosts.
    """
    hosts = Mesh(_first_devices(mesh), ("process",))
    row = PartitionSpec("process")
    copy = jax.jit(lambda rows: rows, out_shardings=NamedSharding(hosts, REPLICATED))
    join = jax.jit(
        jax.shard_map(lambda rows: jax.lax.psum(rows[0], "process"), mesh=hosts, in_specs=row, out_specs=REPLICATED)
    )

    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        with jax.disable_jit(False):  # operation by operation no host sees what another has
            return np.asarray(copy(from_process(NamedSharding(hosts, row), data[None])))

    def broadcast(data: Bytes, root: int) -> Bytes:
        # A broadcast as a sum of bytes to which only the root contributes: exact for any dtype.
        mine = data if jax.process_index() == hosts.devices.flat[root].process_index else np.zeros_like(data)
        with jax.disable_jit(False):
            return np.asarray(join(from_process(NamedSharding(hosts, row), mine[None])))

    return Hosts(all_gather, broadcast)


def _turned(mesh: Mesh, axis_name: str, turn: int) -> Transport:
    """A transport over the same devices in a cyclically later order.

    XLA keeps one Gloo communicator for each order of devices, and on one communicator two sums at once mix, without an
    error. Sums of floats may differ in the last bits, equally on all ranks.
    """
    ring = Mesh(np.roll(mesh.devices.reshape(-1), -turn).reshape(mesh.devices.shape), mesh.axis_names)
    placement = mesh_placement(ring, axis_name)
    communicator = axis_communicator(axis_name, mesh.shape[axis_name], mesh.devices.flat[0].platform)
    other = mesh_transport(placement, communicator)

    def there(x: jax.Array, home: Mesh, spec: PartitionSpec) -> jax.Array:
        """What this process has of an array, as part of one over the devices in another order."""
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(home, spec), parts)

    own = mesh_transport(mesh_placement(mesh, axis_name), communicator)  # parts have owners, in the mesh's own order
    return own._replace(
        all_reduce=lambda x: there(other.all_reduce(there(x, ring, placement.per_replica)), mesh, REPLICATED),
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
