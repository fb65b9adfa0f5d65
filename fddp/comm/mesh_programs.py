"""The placement of replicas along one axis of a mesh."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fddp.comm.donation import Donation
from fddp.comm.placement import NO_AXES, REPLICATED, Placement, device_cache, placed, placed_alike
from fddp.jax_internals import CPU_OPTIONS, GPU_OPTIONS, over_axes


@device_cache
def mesh_placement(mesh: Mesh, axis_name: str) -> Placement:
    """Makes the placement of replicas along one axis; a replica's devices lie along the others."""
    single = mesh.shape[axis_name] == mesh.size  # a replica is one device
    if not single:  # XLA partitions the loss along the other axes
        mesh = Mesh(
            mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
    per_replica = PartitionSpec(axis_name)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = GPU_OPTIONS
    if on_cpu:
        options = CPU_OPTIONS
    sharding = functools.cache(partial(NamedSharding, mesh))
    fed_by_programs = single and sharding(per_replica).is_fully_addressable
    view = NO_AXES if single else mesh.abstract_mesh.update_axis_types({axis_name: AxisType.Manual})

    spec = (lambda x: REPLICATED) if single else partial(_along_others, mesh, axis_name)

    def program(
        f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        # `over_axes` sets check_vma=False: else JAX sums the gradients over replicas, leaf by leaf.
        spread = over_axes(
            f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis_name}
        )
        # Replicas of several devices leave arguments where `place` put them. Results have
        # shardings, too: XLA replicates empty arrays, and the next program would refuse them.
        specs = {"in_shardings": in_specs, "out_shardings": out_specs} if single else {}
        places: Any = jax.tree.map(sharding, specs)
        return jax.jit(spread, **places, donate_argnums=tuple(donate), compiler_options=options)

    def place(tree: PyTree, where: PartitionSpec) -> Any:
        if single:
            return placed_alike(tree, sharding(where))
        # The parts of an array stay on their devices of a replica.
        return jax.tree.map(lambda x: placed(x, sharding(_with_replicas(where, spec(x)))), tree)

    def feed(rows: PyTree) -> Any:
        # A program copies a host's arrays by itself, and much faster, if they are on no other host.
        committed = [isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(rows)]
        if fed_by_programs and not any(committed):
            return rows
        return place(rows, per_replica)

    return Placement(
        axis_name=axis_name,
        axis_size=mesh.shape[axis_name],
        on_mesh=True,
        per_replica=per_replica,
        # Steps in flight may block all threads of XLA:CPU in all-reduces that wait for a device.
        shares_cores=on_cpu and mesh.size > len(first_devices(mesh)),
        overlaps=not on_cpu,
        view=view,
        spec=spec,
        program=program,
        place=place,
        donation=Donation(sharding(REPLICATED) if single else None),
        per_device=_per_device,
        join_devices=partial(_join_devices, mesh.shape[axis_name], sharding),
        as_program_rows=feed,
    )


def _per_device(x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the parts of an array, one per replica of this process."""
    # A part may have the mesh of its array, and JAX would place all results along its axes.
    return tuple(jax.device_put(part.data, part.device) for part in x.addressable_shards)


def _join_devices(
    replicas: int,
    sharding: Callable[[PartitionSpec], NamedSharding],
    arrays: Sequence[jax.Array],
    where: PartitionSpec,
) -> Any:
    """Joins the parts of this process's replicas to one array: the inverse of `_each`."""
    shape = arrays[0].shape
    if shape and where != REPLICATED:
        shape = (replicas * shape[0], *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding(where), list(arrays))


def first_devices(mesh: Mesh) -> list[Any]:
    """Returns one device of each process, in the order of the mesh."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return list(first.values())


def _along_others(mesh: Mesh, axis_name: str, x: Any) -> PartitionSpec:
    """Reads an array's spec along the axes of a mesh other than the replicas'."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _same_devices(sharding.mesh, mesh):
        return REPLICATED
    entries = [_without(entry, axis_name) for entry in sharding.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _with_replicas(where: PartitionSpec, along_others: PartitionSpec) -> PartitionSpec:
    """Adds the replicas' axis to the spec along the other axes, if `where` is per replica."""
    if where == REPLICATED:
        return along_others
    (axis,) = where
    first, *more = along_others or (None,)
    if first is None:
        first = ()
    elif not isinstance(first, tuple):
        first = (first,)
    return PartitionSpec((axis, *first), *more)


def _same_devices(candidate: object, mesh: Mesh) -> bool:
    return (
        isinstance(candidate, Mesh)
        and candidate.shape == mesh.shape
        and bool(np.all(candidate.devices == mesh.devices))
    )


def _without(entry: Any, axis_name: str) -> Any:
    """Drops an axis from an entry of a spec: the array is equal along it."""
    if isinstance(entry, tuple):
        return tuple(axis for axis in entry if axis != axis_name) or None
    if entry == axis_name:
        return None
    return entry
