"""Arrays and their parts on the devices of a process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def parts_here(x: jax.Array) -> Sequence[Any]:
    """Returns an array's parts on this process's devices.

    Relies on `_arrays`, and for random keys on `_base_array`. The public `addressable_shards` makes
    a record of each part, which takes five times as long.
    """
    array: Any = x
    try:  # faster than a look for `_base_array`, which few arrays have
        return array._arrays
    except AttributeError:
        return array._base_array._arrays


def given_away(x: jax.Array) -> bool:
    """True if an array's memory was donated or deleted, on any device.

    `is_deleted` checks only the first part. A part that NumPy views stays when the parts on other
    devices are deleted.
    """
    if x.is_deleted():
        return True
    parts = parts_here(x)
    return len(parts) > 1 and any(part.is_deleted() for part in parts)


def resharded(x: jax.Array, spec: PartitionSpec, mesh: Mesh | None = None) -> jax.Array:
    """Lays out an array along Explicit axes inside a program; leaves Auto axes to XLA."""
    target = mesh or jax.typeof(x).sharding.mesh
    if not target.explicit_axes:
        return x
    return jax.sharding.reshard(x, NamedSharding(target, spec))


def rows_here(x: Any) -> Any:
    """Returns this process's rows of an array on several processes, and other values unchanged."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    rows_by_start = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = [rows_by_start[start] for start in sorted(rows_by_start)]
    if any(part.shape[1:] != x.shape[1:] for part in rows):
        raise ValueError(
            f"a batch may be cut only along its first dim, got an array with {x.sharding}: "
            "no process has whole rows of it."
        )
    if len(rows) == 1:
        return rows[0]
    return np.concatenate(rows)


def on_mesh(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns this process's parts of an array as an array over another mesh, without a copy."""
    spec = PartitionSpec()
    if isinstance(x.sharding, NamedSharding):
        spec = x.sharding.spec
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, spec), [shard.data for shard in x.addressable_shards]
    )


def part_shape(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the dims of the part of an array on one device; `mesh` may be that of a program.

    Relies on `shard_shape`, which does not know manual axes: it gets a mesh without axis types.
    """
    return NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names), spec).shard_shape(shape)


def replicated_over(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Copies a local array to this process's devices of a mesh; every process has the array."""
    # `device_put` to a mesh of several processes would be a transfer between hosts.
    sharding = NamedSharding(mesh, PartitionSpec())
    places = sharding.addressable_devices_indices_map(x.shape)
    copies = [jax.device_put(x, device) for device in places]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, copies)
