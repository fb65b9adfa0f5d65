"""The placement of replicas along one axis of a mesh: the devices of their programs, and how XLA compiles these."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fddp.comm.placement import REPLICATED, WHOLE, Placement, held_alike, placed, placed_alike
from fddp.jax_internals import OVERLAP_OPTIONS, PIPELINED_ROUNDS, over_axes

# By default XLA merges all buckets into one all-reduce, scatter or gather: on CPU without any limit, on GPU up to 30
# MiB. XLA:CPU drops barriers before it puts instructions in order; ranks whose programs differ would then call
# collectives in different orders. It compiles loops of less than 1 KiB as small calls, and aborts at a barrier in such
# a loop (`jax.checkpoint` in a scan). On GPUs before Hopper XLA's scheduler overlaps nothing by default.
CPU_OPTIONS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander,small-while-loop-hoisting"}
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    **PIPELINED_ROUNDS,
    **OVERLAP_OPTIONS,
}


def mesh_placement(mesh: Mesh, axis_name: str) -> Placement:
    """Makes the placement of replicas along one axis of a mesh.

    Args:
      mesh: devices of one or several processes.
      axis_name: the axis along which replicas lie; the devices of one replica lie along the other axes.

    Returns:
      The placement.
    """
    single = mesh.shape[axis_name] == mesh.size  # a replica is one device
    if not single:  # XLA partitions the loss along the other axes
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    per_replica = PartitionSpec(axis_name)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = CPU_OPTIONS if on_cpu else GPU_OPTIONS
    sharding = functools.cache(partial(NamedSharding, mesh))
    fed_by_programs = single and sharding(per_replica).is_fully_addressable
    view = WHOLE if single else mesh.abstract_mesh.update_axis_types({axis_name: AxisType.Manual})

    spec = (lambda x: REPLICATED) if single else partial(_along_others, mesh, axis_name)

    def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
        # `over_axes` sets check_vma=False: gradients stay each replica's own until we sum them, not leaf by leaf.
        spread = over_axes(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis_name})
        # Replicas of several devices leave arguments where `place` put them. The shardings of results are given too:
        # XLA finds that arrays without elements are equal everywhere, and the next program would refuse them.
        specs = {"in_shardings": in_specs, "out_shardings": out_specs} if single else {}
        places: Any = jax.tree.map(sharding, specs)
        return jax.jit(spread, **places, donate_argnums=tuple(donate), compiler_options=options)

    def place(tree: Any, where: PartitionSpec) -> Any:
        if single:
            return placed_alike(tree, sharding(where))
        # The parts that the devices of a replica hold stay theirs.
        return jax.tree.map(lambda x: placed(x, sharding(_with_replicas(where, spec(x)))), tree)

    def feed(rows: Any) -> Any:
        # A program takes the host's arrays by itself, and much faster, unless other processes hold some of them.
        if fed_by_programs and not _committed(rows):
            return rows
        return place(rows, per_replica)

    def together(arrays: Sequence[Any], where: PartitionSpec) -> Any:
        first, *more = arrays[0].shape or (1,)
        times = 1 if where == REPLICATED else mesh.shape[axis_name]
        shape = (times * first, *more) if arrays[0].shape else ()
        return jax.make_array_from_single_device_arrays(shape, sharding(where), list(arrays))

    return Placement(
        axis_name=axis_name,
        axis_size=mesh.shape[axis_name],
        on_mesh=True,
        per_replica=per_replica,
        replicas_in_array=mesh.shape[axis_name],
        # With several steps under way all threads of XLA:CPU may wait in all-reduces, for devices that have none left.
        shares_cores=on_cpu and mesh.size > len(first_devices(mesh)),
        overlaps=not on_cpu,
        view=view,
        spec=spec,
        program=program,
        place=place,
        holds=partial(held_alike, sharding(REPLICATED)) if single else lambda arrays: False,
        each=lambda x: tuple(shard.data for shard in x.addressable_shards),
        together=together,
        feed=feed,
    )


def first_devices(mesh: Mesh) -> list[Any]:
    """One device of each process, in the order of the mesh."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return list(first.values())


def _along_others(mesh: Mesh, axis_name: str, x: Any) -> PartitionSpec:
    """Reads how the user placed an array along the axes of a mesh beside that of the replicas."""
    own = getattr(x, "sharding", None)
    if not isinstance(own, NamedSharding) or not _same_devices(own.mesh, mesh):
        return REPLICATED
    entries = [_without(entry, axis_name) for entry in own.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _with_replicas(where: PartitionSpec, along_others: PartitionSpec) -> PartitionSpec:
    """Adds the replicas' axis to the spec of an array along the others, if the array has rows of each replica."""
    if where == REPLICATED:
        return along_others
    (axis,) = where
    first, *more = along_others or (None,)
    within = first if isinstance(first, tuple) else () if first is None else (first,)
    return PartitionSpec((axis, *within), *more)


def _same_devices(mesh: Any, other: Mesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.shape == other.shape and bool(np.all(mesh.devices == other.devices))


def _without(entry: Any, axis_name: str) -> Any:
    """Takes an axis out of an entry of a spec, for an array that is equal along it."""
    if isinstance(entry, tuple):
        return tuple(axis for axis in entry if axis != axis_name) or None
    return None if entry == axis_name else entry


def _committed(tree: Any) -> bool:
    """Whether the user has put some of these arrays on a device of their own choice."""
    return any(isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(tree))
