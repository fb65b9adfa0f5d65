"""Arrays, as JAX has them on the devices of a process."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Arrays = TypeVar("Arrays")


def parts_here(x: jax.Array) -> Sequence[Any]:
    """An array's parts on this process's devices. Relies on `_arrays`, of random keys on `_base_array`.

    The public `addressable_shards` makes a record of each part, which takes five times as long.
    """
    whole: Any = getattr(x, "_base_array", x)
    return whole._arrays


def given_away(x: jax.Array) -> bool:
    """Whether an array's memory, on any device, was used for something else.

    `is_deleted` asks the first part alone: what NumPy looks at stays when the parts on the other devices go.
    """
    return x.is_deleted() or any(part.is_deleted() for part in parts_here(x))


def with_parts_listed(arrays: Arrays) -> Arrays:
    """Lists the parts of arrays that have just been made, so that several threads may ask for them.

    JAX lists an array's parts when somebody first asks. Of two threads that ask at the same time, one gets each part
    twice.

    Args:
      arrays: a tree of arrays that no other thread has seen yet.

    Returns:
      The same tree.
    """
    for x in jax.tree.leaves(arrays):
        parts_here(x)
    return arrays


def resharded(x: jax.Array, spec: PartitionSpec, mesh: Mesh | None = None) -> jax.Array:
    """Lays an array along axes of a mesh, inside a program, if they are Explicit: XLA sees to Auto axes."""
    target = mesh or jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(target, spec)) if target.explicit_axes else x


def rows_here(x: Any) -> Any:
    """Finds this process's rows of an array that lies on several processes.

    Anything else is returned unchanged.

    Raises:
      ValueError: the array lies in parts along another dim, so that no process has whole rows.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = [parts[begin] for begin in sorted(parts)]
    if any(part.shape[1:] != x.shape[1:] for part in rows):
        raise ValueError(
            f"a batch may be cut along its first dim alone, got an array with {x.sharding}: "
            "no process has whole rows of it."
        )
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def on_mesh(x: jax.Array, mesh: Mesh) -> jax.Array:
    """This process's parts of an array as an array over another mesh; nothing is copied."""
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, spec), [shard.data for shard in x.addressable_shards]
    )


def part_shape(mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of the part of an array that one device holds. Relies on `shard_shape`, which knows no axes that are manual.

    Args:
      mesh: the devices, as a function inside a program may see them.
      spec: the axes along which the array is cut.
      shape: dims of the array.

    Returns:
      The dims.
    """
    return NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names), spec).shard_shape(shape)
