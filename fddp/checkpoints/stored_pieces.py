"""The pieces of stored arrays that a process has: copied from a state, and read into one.

An array that replicas hold in parts is stored without padding, as layers and columns, of which
each replica has some columns. So any number of replicas can read it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from fddp.buckets import ShardLayout, is_shard
from fddp.checkpoints.files import Index, Listed, Pieces, Read
from fddp.checkpoints.saved_leaves import (
    Leaf,
    check_fits,
    form_of_words,
    is_key,
    named_leaves,
    stored_dims,
)
from fddp.comm import REPLICATED, Group
from fddp.step import TrainState


def is_distributed(group: Group, leaf: Leaf) -> bool:
    """True if rank 0 holds less than all of an array; equal on all ranks."""
    if group.processes == 1:
        return False
    return leaf.rows or (_on_mesh(leaf.x) and not leaf.x.is_fully_replicated)


def local_pieces(group: Group, leaf: Leaf) -> Pieces:
    """Copies the pieces of an array that this process writes; of replicated arrays rank 0's."""
    x = jax.random.key_data(leaf.x) if is_key(leaf.x) else leaf.x
    if leaf.rows and group.placement.on_mesh and not _on_mesh(x):  # the user's host arrays
        x = group.placement.place(x, group.placement.per_replica)
    pieces = list[tuple[Index, Any]]()
    if _on_mesh(x):
        parts = [part for part in x.addressable_shards if part.replica_id == 0]
        pieces = [(_place(group, leaf, part.index, x.shape), part.data) for part in parts]
    elif leaf.rows or group.rank == 0:
        pieces = [(_place(group, leaf, (), x.shape), x)]
    # Copied, since the next step may reuse the memory of the state.
    pieces = [(place, np.array(piece)) for place, piece in pieces]
    if layout := leaf.layout:
        columns = [(_columns(layout, place), piece) for place, piece in pieces]
        pieces = [
            (place, x.reshape(layout.depth, -1)[:, : place[1].stop - place[1].start])
            for place, x in columns
        ]
    return [(place, piece) for place, piece in pieces if piece.size]


def read_state(
    group: Group, listed: Listed, read: Read, like: TrainState, local: Sequence[str]
) -> TrainState:
    """Reads a checkpoint into a state like `like`; each process reads its own pieces, leaf by leaf.

    `like` has arrays, or forms from `step.shapes`. On another number of replicas the fields in
    `local` are those of `like`. A checkpoint of another training is a ValueError.
    """
    leaves = named_leaves(like, local)
    retained = check_fits(group, listed, leaves, local)
    arrays = [
        leaf.x if name in retained else _read_like(group, name, leaf, read)
        for name, leaf in leaves.items()
    ]
    flat, tree = jax.tree.flatten(like, is_leaf=is_shard)
    return tree.unflatten(
        replace(x, parts=array) if is_shard(x) else array for x, array in zip(flat, arrays)
    )


def _read_like(group: Group, name: str, leaf: Leaf, read: Read) -> Any:
    """Reads this process's pieces into an array like that of `leaf`."""
    form = form_of_words(leaf.x)
    layout = leaf.layout

    def piece(index: Any) -> np.ndarray:
        place = _place(group, leaf, index, form.shape)
        dims = stored_dims(group, leaf)
        if layout is None:
            return read(name, dims, place)
        x = read(name, dims, _columns(layout, place))
        padding = layout.dims[-1] - x.shape[1]
        return np.pad(x, ((0, 0), (0, padding))).reshape(layout.dims)

    if isinstance(leaf.x, np.ndarray | np.generic) and not leaf.rows:
        return piece(())
    array = jax.make_array_from_callback(form.shape, _sharding(group, name, leaf), piece)
    if not is_key(leaf.x):
        return array
    impls = list[Any]()
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf.x)
    return jax.random.wrap_key_data(array, impl=impls[0])


def _place(group: Group, leaf: Leaf, index: Index, shape: tuple[int, ...]) -> Index:
    """Returns the range in the array of all replicas, with explicit ends, of a part on a device."""
    all_dims = (*index, *[slice(None)] * (len(shape) - len(index)))
    place = tuple(slice(*dim.indices(n)[:2]) for dim, n in zip(all_dims, shape))
    if leaf.rows and not group.placement.on_mesh:  # an array is of one replica
        return (slice(group.rank * shape[0], (group.rank + 1) * shape[0]), *place[1:])
    return place


def _columns(layout: ShardLayout, place: Index) -> Index:
    """The range of a replica's part in the stored array; `place` is that in all replicas' parts."""
    replica = place[0].start // max(1, layout.dims[0])
    begin, end = (min(k * layout.dims[-1], layout.layer_size) for k in (replica, replica + 1))
    return slice(0, layout.depth), slice(begin, end)


def _sharding(group: Group, name: str, leaf: Leaf) -> Any:
    """Returns the sharding of an array, or the sharding for an array of this form."""
    if isinstance(leaf.x, jax.Array):
        return (jax.random.key_data(leaf.x) if is_key(leaf.x) else leaf.x).sharding
    placement = group.placement
    if placement.other_axes:
        raise ValueError(
            f"a form does not say where the parts of {name} lie along "
            f"{', '.join(map(repr, placement.other_axes))}: restore into a state from step.init."
        )
    rows = np.zeros(group.size // group.processes)
    return placement.place(rows, placement.per_replica if leaf.rows else REPLICATED).sharding


def _on_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
