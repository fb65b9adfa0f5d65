"""Converts a state to host arrays for files, and back, on any backend and any number of replicas.

Each process writes its own pieces of an array that replicas hold in parts. A shard is written as an
array with one row for each layer that is cut separately, and a process writes some columns. If the
devices of a replica hold parts of an array, its rows are stored part after part, and the list
records it. Rank 0 writes replicated arrays.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike

from fddp.buckets import UNCUT, DeviceCut, Shard, is_shard, of_rows, part_dims, stacked
from fddp.checkpoints.files import Listed
from fddp.checkpoints.pending import of_other_replicas, with_pending
from fddp.checkpoints.state_forms import (
    OWN,
    by_path,
    check_fits,
    is_key,
    is_row,
    key_impl,
    of_flat_words,
    part_of_state,
    word_form,
    words,
)
from fddp.checkpoints.stored_arrays import Index, Portion, Read
from fddp.comm import REPLICATED, Group, Nodes, whole_here
from fddp.sharding import whole
from fddp.step import TrainState


def lies_apart(group: Group, state: TrainState) -> bool:
    """True if rank 0 holds less than all of a state; equal on all ranks."""
    return any(
        is_shard(x) or is_row(group, name) or not _here(x) for name, x in by_path(state).items()
    )


def copy_local(group: Group, state: TrainState) -> list[Portion]:
    """Copies the pieces of a state that this process writes."""
    portions = [_held(group, name, x) for name, x in by_path(state).items()]
    return [
        portion._replace(pieces=_copied(portion.pieces))
        for portion in portions
        if portion.pieces and prod(portion.dims)
    ]


def copy_gathered(group: Group, state: TrainState) -> list[Portion]:
    """Copies a whole state on rank 0, and nothing on the other ranks; every rank calls it."""
    portions = list[Portion]()
    for name, x in by_path(state).items():
        x = _copies(group, words(x)) if is_shard(x) else words(x)
        if is_row(group, name):
            x = np.concatenate(group.all_gather(x))
        elif not _here(x):
            x = jax.block_until_ready(whole_here(x))
        if group.rank == 0 and x.size:
            portions.append(_everything(name, np.array(x)))
    return portions


def _copies(group: Group, x: Shard) -> Any:
    """Returns the whole array of a shard, or the stack of its copies."""
    if not x.copies or x.nodes is None:
        return whole(stacked(x, group.size), group=group)
    dims = x.parts.shape
    count = 1 if group.placement.on_mesh else group.size
    flat = replace(x, shape=(count * dims[0], *dims[1:]), copies=False, nodes=None, depth=1)
    rows = np.asarray(whole(flat, group=group)).reshape(
        group.size, -1, dims[-1] if x.depth > 1 else 1
    )
    copies = [rows[list(node)].reshape(-1, *dims[1:]) for node in x.nodes]
    return np.stack([np.asarray(of_rows(jnp.asarray(copy), x.shape, x.depth)) for copy in copies])


def laid(group: Group, number: int, listed: Listed, read: Read, like: TrainState) -> TrainState:
    """Reads a checkpoint into a state like `like`; each process reads its own pieces, leaf by leaf.

    `like` has arrays, or forms from `step.shapes`. If the checkpoint is of another number of
    replicas, the hooks' memory is taken from `like`. A checkpoint of another training is a
    ValueError.
    """
    like = with_pending(group, listed, like)
    leaves = by_path(like)
    retained = check_fits(group, number, listed, leaves)
    if any(isinstance(leaves[name], jax.ShapeDtypeStruct) for name in retained):
        raise ValueError(
            f"the checkpoint is of {listed.told['replicas']} replicas and these are {group.size}: "
            "the memory of the hook is reset, so restore into a state from step.init."
        )

    def filled(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        """Reads a range; arrays without elements are not stored."""
        return (
            read(name, dims, place) if prod(dims) else np.zeros(dims, listed.forms[name][0])[place]
        )

    def leaf(name: str, x: Any) -> Any:
        read = of_other_replicas(group, listed, name, filled)
        return x if name in retained else _laid(group, name, x, _in_order(listed, name, x, read))

    return jax.tree.structure(like, is_leaf=is_shard).unflatten(
        [leaf(name, x) for name, x in leaves.items()]
    )


def _held(group: Group, name: str, x: Any) -> Portion:
    """Returns an array's description and the pieces that this process writes."""
    if is_shard(x):
        return _held_columns(group, name, words(x))
    x = words(x)
    if is_row(group, name):
        return Portion(name, (group.size, *x.shape[1:]), x.shape, [(_own_row(group, x), x)])
    if _on_mesh(x):
        pieces = [
            (_closed(part.index, x.shape), part.data)
            for part in x.addressable_shards
            if part.replica_id == 0
        ]
        return Portion(name, x.shape, x.sharding.shard_shape(x.shape), pieces)
    return _everything(name, x) if group.rank == 0 else Portion(name, x.shape, x.shape, ())


def _held_columns(group: Group, name: str, x: Shard) -> Portion:
    """Returns this process's pieces of a shard, unpadded; of equal nodes the first writes."""
    layout = _lying(group, x)
    writers = {
        replica for node in (layout.sharing if x.copies else layout.sharing[:1]) for replica in node
    }
    pieces = list[tuple[Index, Any]]()
    for place, part in _own_parts(group, x):
        replica, rows = _owner(group, layout, place)
        layers, columns = layout.of(replica, rows)
        if replica in writers and columns.start < columns.stop:
            piece = np.asarray(part).reshape(-1, layout.width)[:, : columns.stop - columns.start]
            pieces.append(((layers, columns), piece))
    return Portion(name, layout.dims, (layout.depth // x.cut.parts, layout.width), pieces)


def _own_parts(group: Group, x: Shard) -> Iterator[tuple[Index, Any]]:
    """Yields the parts of a shard on this process, each with its range in `x.parts`."""
    if not group.placement.on_mesh:
        yield _closed((), x.parts.shape), x.parts
        return
    array = (
        x.parts
        if _on_mesh(x.parts)
        else group.placement.place(x.parts, group.placement.per_replica)
    )
    for part in array.addressable_shards:
        if part.replica_id == 0:  # devices of a replica may hold copies
            yield _closed(part.index, array.shape), part.data


def _everything(name: str, x: Any) -> Portion:
    return Portion(name, x.shape, x.shape, [(_closed((), x.shape), x)])


def _copied(pieces: Iterable[tuple[Index, ArrayLike]]) -> list[tuple[Index, np.ndarray]]:
    """Copies pieces, since the next step may reuse the memory of the state."""
    return [(place, np.array(x)) for place, x in pieces]


def _laid(group: Group, name: str, x: Any, read: Read) -> Any:
    """Reads this process's pieces into an array like `x`."""
    like = word_form(x)
    if is_shard(x):
        flat = _laid_columns(group, name, like, _sharding(group, name, x.parts, apart=True), read)
        return replace(x, parts=of_flat_words(flat, x.parts))

    def piece(place: Any) -> np.ndarray:
        if is_row(group, name):
            return read(name, (group.size, *like.shape[1:]), _own_row(group, like))
        return read(name, like.shape, _closed(place, like.shape))

    if isinstance(x, np.ndarray | np.generic):
        return piece(())
    array = jax.make_array_from_callback(like.shape, _sharding(group, name, x), piece)
    return jax.random.wrap_key_data(array, impl=key_impl(x)) if is_key(x) else array


def _laid_columns(group: Group, name: str, x: Shard, sharding: Sharding, read: Read) -> jax.Array:
    """Reads this process's columns of a shard, and pads them with zeros."""
    layout = _lying(group, x)

    def part(place: Any) -> np.ndarray:
        place = _closed(place, x.parts.shape)
        piece = read(name, layout.dims, layout.of(*_owner(group, layout, place)))
        padded = np.pad(piece, ((0, 0), (0, layout.width - piece.shape[1])))
        return padded.reshape([dim.stop - dim.start for dim in place])

    return jax.make_array_from_callback(x.parts.shape, sharding, part)


class StoredLayout(NamedTuple):
    """The layout of replicas' parts in a stored array of layers and columns."""

    sharing: Nodes
    """The sets of replicas that hold all of the array, or a copy of it."""
    dims: tuple[int, int]
    """Number of layers, of all copies, and number of columns."""
    depth: int
    """Number of layers of a replica."""
    width: int
    """Number of columns of a replica, including padding."""

    def of(self, replica: int, rows: slice) -> tuple[slice, slice]:
        """Returns the range in the array of some rows of a replica's part, without padding."""
        ((node, place),) = [
            (n, node.index(replica)) for n, node in enumerate(self.sharing) if replica in node
        ]
        layers = node * self.depth % self.dims[0]
        begin, end = (min(self.dims[1], at * self.width) for at in (place, place + 1))
        return slice(layers + rows.start, layers + rows.stop), slice(begin, end)


def _lying(group: Group, x: Shard) -> StoredLayout:
    """Finds the layout of a shard. Copies of nodes are layers; copies of replicas are one array."""
    whole_copies = x.copies and x.nodes is None
    sharing = (tuple(range(group.size)),) if whole_copies else group.sharing
    size = prod(stacked(x, group.size).shape if whole_copies else x.shape)
    copies = len(sharing) if x.copies else 1
    width = part_dims(size, len(sharing[0]), x.depth)[-1]
    return StoredLayout(sharing, (copies * x.depth, size // x.depth), x.depth, width)


def _owner(group: Group, layout: StoredLayout, place: Index) -> tuple[int, slice]:
    """Returns the replica with a range of the array of all parts, and the rows in its part."""
    begin = place[0].start
    replica_length = layout.depth if layout.depth > 1 else max(1, layout.width)
    replica = begin // replica_length if group.placement.on_mesh else group.rank
    if layout.depth == 1:
        return replica, slice(0, 1)
    first = begin % replica_length
    return replica, slice(first, first + place[0].stop - begin)


def _in_order(listed: Listed, name: str, x: Any, read: Read) -> Read:
    """Makes a `Read` in the order of `x`; the saved array may be cut among devices differently."""
    saved_cut = DeviceCut(dims=tuple((n, length) for n, length in listed.cuts.get(name, ())))
    new_cut = x.cut if is_shard(x) else UNCUT
    if saved_cut.dims == new_cut.dims:
        return read

    @cache
    def whole() -> np.ndarray:
        dims = (saved_cut.parts, *saved_cut.of_device(x.shape))
        return new_cut.stacked(saved_cut.joined(read(name, dims, tuple(map(slice, dims))), x.shape))

    return lambda name, dims, place: whole().reshape(dims)[place]


def _own_row(group: Group, x: jax.Array | jax.ShapeDtypeStruct) -> Index:
    return (slice(group.rank, group.rank + 1), *_closed((), x.shape[1:]))


def _closed(place: Index, shape: tuple[int, ...]) -> Index:
    """Returns the range with explicit ends, and with all of the missing dims."""
    all_dims = (*place, *[slice(None)] * (len(shape) - len(place)))
    return tuple(slice(*dim.indices(n)[:2]) for dim, n in zip(all_dims, shape))


def _sharding(group: Group, name: str, x: Any, apart: bool = False) -> Any:
    """Returns the sharding of an array, or the sharding for an array of this form."""
    if isinstance(x, jax.Array):
        return x.sharding if apart else words(x).sharding
    if axes := group.placement.other_axes:
        raise ValueError(
            f"a form does not say where the parts of {name} lie along "
            f"{', '.join(map(repr, axes))}: restore into a state from step.init."
        )
    replicated = group.placement.place(np.zeros(()), REPLICATED).sharding
    if not group.placement.on_mesh:
        return replicated
    return NamedSharding(
        replicated.mesh,
        group.placement.per_replica if apart or part_of_state(name) in OWN else REPLICATED,
    )


def _on_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)


def _here(x: Any) -> bool:
    return not _on_mesh(x) or x.is_fully_addressable or x.is_fully_replicated
