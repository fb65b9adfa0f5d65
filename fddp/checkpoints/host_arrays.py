"""Converts a state to host arrays for files, and back, on any backend and any number of replicas.

Each process writes its own pieces of an array that replicas hold in parts. A shard is written as an
array with one row for each layer that is cut separately, and a process writes some columns. If the
devices of a replica hold parts of an array, its rows are stored part after part, and the list
records it. Rank 0 writes replicated arrays.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from fddp.buckets import UNCUT, DeviceCut, Layout, Shard, is_shard, stack_shape
from fddp.checkpoints.files import Listed
from fddp.checkpoints.pending import of_other_replicas, with_pending
from fddp.checkpoints.state_forms import (
    PER_REPLICA,
    by_path,
    check_fits,
    is_key,
    is_row_of_rank,
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


def is_distributed(group: Group, state: TrainState) -> bool:
    """True if rank 0 holds less than all of a state; equal on all ranks."""
    return any(
        is_shard(x) or is_row_of_rank(group, name) or not _is_readable(x)
        for name, x in by_path(state).items()
    )


def copy_local(group: Group, state: TrainState) -> list[Portion]:
    """Copies the pieces of a state that this process writes."""
    portions = list[Portion]()
    for name, x in by_path(state).items():
        portion = local_portion(group, name, words(x))
        # Copied, since the next step may reuse the memory of the state.
        pieces = [(place, np.array(piece)) for place, piece in portion.pieces]
        if pieces and prod(portion.dims):
            portions.append(portion._replace(pieces=pieces))
    return portions


def copy_gathered(group: Group, state: TrainState) -> list[Portion]:
    """Copies a whole state on rank 0, and nothing on the other ranks; every rank calls it."""
    portions = list[Portion]()
    for name, x in by_path(state).items():
        x = words(x)
        if is_shard(x):
            x = _gathered(group, x)
        if is_row_of_rank(group, name):
            x = np.concatenate(group.all_gather(x))
        elif not _is_readable(x):
            x = jax.block_until_ready(whole_here(x))
        if group.rank == 0 and x.size:
            portions.append(_whole_portion(name, np.array(x)))
    return portions


def read_state(
    group: Group, number: int, listed: Listed, read: Read, like: TrainState
) -> TrainState:
    """Reads a checkpoint into a state like `like`; each process reads its own pieces, leaf by leaf.

    `like` has arrays, or forms from `step.shapes`. If the checkpoint is of another number of
    replicas, the hooks' memory is taken from `like`. A checkpoint of another training is a
    ValueError.
    """
    like = with_pending(group, listed, like)
    leaves = by_path(like)
    retained = check_fits(group, number, listed, leaves)
    if any(isinstance(leaves[name], jax.ShapeDtypeStruct) for name in retained):
        saved_replicas = listed.values["replicas"]
        raise ValueError(
            f"the checkpoint is of {saved_replicas} replicas and these are {group.size}: "
            "the memory of the hook is reset, so restore into a state from step.init."
        )

    def read_nonempty(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        if prod(dims):
            return read(name, dims, place)
        return np.zeros(dims, listed.forms[name][0])[place]  # not stored

    for name, x in leaves.items():
        if name not in retained:
            read_saved = of_other_replicas(group, listed, name, read_nonempty)
            read_ordered = _in_device_order(listed, name, x, read_saved)
            leaves[name] = _read_like(group, name, x, read_ordered)
    return jax.tree.structure(like, is_leaf=is_shard).unflatten(leaves.values())


def _gathered(group: Group, x: Shard) -> Any:
    """Returns the whole array of a shard, or the stack of its copies."""
    if not x.copies:
        return whole(x, group=group)
    if x.nodes is None:
        stack = Layout(stack_shape(x, group.size), group.size)
        return whole(replace(x, layout=stack, copies=False), group=group)
    all_parts = Layout((group.size, *x.layout.dims), group.size)
    shard = replace(x, layout=all_parts, copies=False, nodes=None)
    parts = np.asarray(whole(shard, group=group))
    copies = [x.layout.join(jnp.asarray(parts[list(node)])) for node in x.nodes]
    return np.stack([np.asarray(copy) for copy in copies])


def local_portion(group: Group, name: str, x: Any) -> Portion:
    """Returns an array's description and the pieces that this process writes."""
    if is_shard(x):
        return _shard_portion(group, name, x)
    if is_row_of_rank(group, name):
        return Portion(name, (group.size, *x.shape[1:]), x.shape, [(_row_of_rank(group, x), x)])
    if _on_mesh(x):
        pieces = [
            (_explicit(part.index, x.shape), part.data)
            for part in x.addressable_shards
            if part.replica_id == 0
        ]
        return Portion(name, x.shape, x.sharding.shard_shape(x.shape), pieces)
    portion = _whole_portion(name, x)
    return portion if group.rank == 0 else portion._replace(pieces=())


def _whole_portion(name: str, x: Any) -> Portion:
    return Portion(name, x.shape, x.shape, [(_explicit((), x.shape), x)])


def _shard_portion(group: Group, name: str, x: Shard) -> Portion:
    """Returns this process's pieces of a shard, unpadded; of equal nodes the first writes."""
    stored = _stored(group, x)
    writing_nodes = stored.sharing if x.copies else stored.sharing[:1]
    depth = stored.layout.depth
    width = stored.layout.dims[-1]
    pieces = list[tuple[Index, Any]]()
    for place, part in _local_parts(group, x):
        replica, rows = _replica_and_rows(group, stored, place)
        layers, columns = stored.place(replica, rows)
        count = columns.stop - columns.start
        if count and any(replica in node for node in writing_nodes):
            pieces.append(((layers, columns), np.asarray(part).reshape(-1, width)[:, :count]))
    return Portion(name, stored.dims, (depth // x.layout.cut.parts, width), pieces)


def _local_parts(group: Group, x: Shard) -> Iterator[tuple[Index, Any]]:
    """Yields the parts of a shard on this process, each with its range in `x.parts`."""
    parts = x.parts
    if not group.placement.on_mesh:
        yield _explicit((), parts.shape), parts
        return
    if not _on_mesh(parts):
        parts = group.placement.place(parts, group.placement.per_replica)
    for part in parts.addressable_shards:
        if part.replica_id == 0:  # devices of a replica may hold copies
            yield _explicit(part.index, parts.shape), part.data


def _read_like(group: Group, name: str, x: Any, read: Read) -> Any:
    """Reads this process's pieces into an array like `x`."""
    form = word_form(x)
    if is_shard(x):
        sharding = _sharding(group, name, x.parts, per_replica=True)
        parts = _read_parts(group, name, form, sharding, read)
        return replace(x, parts=of_flat_words(parts, x.parts))

    def piece(place: Any) -> np.ndarray:
        if is_row_of_rank(group, name):
            return read(name, (group.size, *form.shape[1:]), _row_of_rank(group, form))
        return read(name, form.shape, _explicit(place, form.shape))

    if isinstance(x, np.ndarray | np.generic):
        return piece(())
    array = jax.make_array_from_callback(form.shape, _sharding(group, name, x), piece)
    return jax.random.wrap_key_data(array, impl=key_impl(x)) if is_key(x) else array


def _read_parts(group: Group, name: str, x: Shard, sharding: Sharding, read: Read) -> jax.Array:
    """Reads this process's columns of a shard, and pads them with zeros."""
    stored = _stored(group, x)

    def part(place: Any) -> np.ndarray:
        place = _explicit(place, x.parts.shape)
        piece = read(name, stored.dims, stored.place(*_replica_and_rows(group, stored, place)))
        padded = np.pad(piece, ((0, 0), (0, stored.layout.dims[-1] - piece.shape[1])))
        return padded.reshape([dim.stop - dim.start for dim in place])

    return jax.make_array_from_callback(x.parts.shape, sharding, part)


class Stored(NamedTuple):
    """A shard as a stored array of layers and columns, of which each replica has a range."""

    layout: Layout
    """Layout of the array, or of each copy."""
    copies: int
    """Number of copies; their layers are stacked."""
    sharing: Nodes
    """The sets of replicas that hold all of the array, or a copy of it."""

    @property
    def dims(self) -> tuple[int, int]:
        """Number of layers, of all copies, and number of columns."""
        return self.copies * self.layout.depth, self.layout.row_size

    def place(self, replica: int, rows: slice) -> tuple[slice, slice]:
        """Returns the range in the array of some rows of a replica's part, without padding."""
        node = next(k for k, members in enumerate(self.sharing) if replica in members)
        width = self.layout.dims[-1]
        begin = self.sharing[node].index(replica) * width
        columns = slice(min(begin, self.dims[1]), min(begin + width, self.dims[1]))
        layer = node * self.layout.depth % self.dims[0]
        return slice(layer + rows.start, layer + rows.stop), columns


def _stored(group: Group, x: Shard) -> Stored:
    """Describes a stored shard. Copies of nodes are layers; copies of replicas are one array."""
    if not x.copies:
        return Stored(x.layout, 1, group.sharing)
    if x.nodes is not None:
        return Stored(x.layout, len(group.sharing), group.sharing)
    stack = Layout(stack_shape(x, group.size), group.size)
    return Stored(stack, 1, (tuple(range(group.size)),))


def _replica_and_rows(group: Group, stored: Stored, place: Index) -> tuple[int, slice]:
    """Returns the replica with a range of the array of all parts, and the rows in its part."""
    begin = place[0].start
    end = place[0].stop
    part_length = max(1, stored.layout.dims[0])
    replica = begin // part_length if group.placement.on_mesh else group.rank
    if stored.layout.depth == 1:
        return replica, slice(0, 1)
    first = begin % part_length
    return replica, slice(first, first + end - begin)


def _in_device_order(listed: Listed, name: str, x: Any, read: Read) -> Read:
    """Makes a `Read` in the order of `x`; the saved array may be cut among devices differently."""
    saved_cut = DeviceCut(dims=tuple((n, length) for n, length in listed.cuts.get(name, ())))
    new_cut = x.layout.cut if is_shard(x) else UNCUT
    if saved_cut.dims == new_cut.dims:
        return read

    @cache
    def reordered() -> np.ndarray:
        dims = (saved_cut.parts, *saved_cut.of_device(x.shape))
        saved = read(name, dims, tuple(map(slice, dims)))
        return new_cut.stacked(saved_cut.joined(saved, x.shape))

    return lambda name, dims, place: reordered().reshape(dims)[place]


def _row_of_rank(group: Group, x: jax.Array | jax.ShapeDtypeStruct) -> Index:
    return (slice(group.rank, group.rank + 1), *_explicit((), x.shape[1:]))


def _explicit(place: Index, shape: tuple[int, ...]) -> Index:
    """Returns the range with explicit ends, and with all of the missing dims."""
    all_dims = (*place, *[slice(None)] * (len(shape) - len(place)))
    return tuple(slice(*dim.indices(n)[:2]) for dim, n in zip(all_dims, shape))


def _sharding(group: Group, name: str, x: Any, per_replica: bool = False) -> Any:
    """Returns the sharding of an array, or the sharding for an array of this form."""
    if isinstance(x, jax.Array):
        return x.sharding if per_replica else words(x).sharding
    if axes := group.placement.other_axes:
        raise ValueError(
            f"a form does not say where the parts of {name} lie along "
            f"{', '.join(map(repr, axes))}: restore into a state from step.init."
        )
    replicated = group.placement.place(np.zeros(()), REPLICATED).sharding
    if group.placement.on_mesh and (per_replica or part_of_state(name) in PER_REPLICA):
        return NamedSharding(replicated.mesh, group.placement.per_replica)
    return replicated


def _on_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)


def _is_readable(x: Any) -> bool:
    """True if this process can read all of the array."""
    return not _on_mesh(x) or x.is_fully_addressable or x.is_fully_replicated
