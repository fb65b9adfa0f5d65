"""A state as arrays of hosts that are written to files, and back: over any backend, to as many replicas or to others.

What replicas hold apart is an array of which each process writes the pieces that it has: of a shard some columns, with
a row for each layer that is cut by itself. Where devices of a replica hold parts of an array, the rows of one part lie
behind those of another, and the list says so. What is equal on all is written by rank 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fddp.buckets import UNCUT, DeviceCut, Shard, is_shard, of_rows, part_dims, stacked
from fddp.checkpoints.files import Listed
from fddp.checkpoints.pending import of_other_replicas, with_pending
from fddp.checkpoints.state_forms import (
    OWN,
    check_fits,
    is_key,
    is_row,
    key_impl,
    named,
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
    """Whether rank 0 has less than all of a state; the same on all ranks."""
    return any(is_shard(x) or is_row(group, name) or not _here(x) for name, x in named(state).items())


def held(group: Group, state: TrainState) -> list[Portion]:
    """The pieces of a state that this process writes, in memory of their own.

    Args:
      group: the replicas.
      state: of a step over them.

    Returns:
      The arrays of which it has pieces.
    """
    portions = [_held(group, name, x) for name, x in named(state).items()]
    return [one._replace(pieces=_copied(one.pieces)) for one in portions if one.pieces and prod(one.dims)]


def gathered(group: Group, state: TrainState) -> list[Portion]:
    """All of a state in arrays of rank 0; every rank calls it, for what is a rank's own is sent.

    Args:
      group: the replicas.
      state: of a step over them.

    Returns:
      The arrays; none on the other ranks.
    """
    portions = list[Portion]()
    for name, x in named(state).items():
        x = _copies(group, words(x)) if is_shard(x) else words(x)
        if is_row(group, name):
            x = np.concatenate(group.all_gather(x))
        elif not _here(x):
            x = jax.block_until_ready(whole_here(x))
        if group.rank == 0 and x.size:
            portions.append(_everything(name, np.array(x)))
    return portions


def _copies(group: Group, x: Shard) -> Any:
    """A whole array, or all its copies along a first dim."""
    if not x.copies or x.nodes is None:
        return whole(stacked(x, group.size), group=group)
    dims = x.parts.shape
    count = 1 if group.placement.on_mesh else group.size
    flat = replace(x, shape=(count * dims[0], *dims[1:]), copies=False, nodes=None, depth=1)
    rows = np.asarray(whole(flat, group=group)).reshape(group.size, -1, dims[-1] if x.depth > 1 else 1)
    copies = [rows[list(node)].reshape(-1, *dims[1:]) for node in x.nodes]
    return np.stack([np.asarray(of_rows(jnp.asarray(one), x.shape, x.depth)) for one in copies])


def laid(group: Group, number: int, listed: Listed, read: Read, like: TrainState) -> TrainState:
    """Lays a checkpoint out as a state of this group; each process reads what it holds, leaf by leaf.

    Args:
      group: the replicas.
      number: of the checkpoint.
      listed: its list; it is of as many replicas, or of others.
      read: reads ranges of its arrays.
      like: arrays, or forms from `step.shapes`. What hooks of other replicas remembered is taken from it.

    Returns:
      The state.

    Raises:
      ValueError: the checkpoint is of another model, optimizer or hook, or there is no form for its pending gradients.
    """
    like = with_pending(group, listed, like)
    leaves = named(like)
    forgotten = check_fits(group, number, listed, leaves)
    if any(isinstance(leaves[name], jax.ShapeDtypeStruct) for name in forgotten):
        raise ValueError(
            f"the checkpoint is of {listed.told['replicas']} replicas and these are {group.size}: what the hook "
            "remembers starts anew, so restore into a state from step.init."
        )

    def filled(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        """Reads a range; what an array without elements has is nowhere."""
        return read(name, dims, place) if prod(dims) else np.zeros(dims, listed.forms[name][0])[place]

    def leaf(name: str, x: Any) -> Any:
        read = of_other_replicas(group, listed, name, filled)
        return x if name in forgotten else _laid(group, name, x, _in_order(listed, name, x, read))

    return jax.tree.structure(like, is_leaf=is_shard).unflatten([leaf(name, x) for name, x in leaves.items()])


def _held(group: Group, name: str, x: Any) -> Portion:
    """An array, and the pieces of it that this process writes."""
    if is_shard(x):
        return _held_columns(group, name, words(x))
    x = words(x)
    if is_row(group, name):
        return Portion(name, (group.size, *x.shape[1:]), x.shape, [(_own_row(group, x), x)])
    if _on_mesh(x):
        pieces = [(_closed(one.index, x.shape), one.data) for one in x.addressable_shards if one.replica_id == 0]
        return Portion(name, x.shape, x.sharding.shard_shape(x.shape), pieces)
    return _everything(name, x) if group.rank == 0 else Portion(name, x.shape, x.shape, ())


def _held_columns(group: Group, name: str, x: Shard) -> Portion:
    """The pieces of a shard that this process writes, without padding: of nodes that have all of it the first does."""
    lies = _lying(group, x)
    writes = {replica for node in (lies.sharing if x.copies else lies.sharing[:1]) for replica in node}
    pieces = list[tuple[Index, Any]]()
    for place, part in _own_parts(group, x):
        replica, rows = _owner(group, lies, place)
        layers, columns = lies.of(replica, rows)
        if replica in writes and columns.start < columns.stop:
            mine = np.asarray(part).reshape(-1, lies.width)[:, : columns.stop - columns.start]
            pieces.append(((layers, columns), mine))
    return Portion(name, lies.dims, (lies.depth // x.cut.parts, lies.width), pieces)


def _own_parts(group: Group, x: Shard) -> Iterator[tuple[Index, Any]]:
    """The parts that this process writes, each with its place."""
    if not group.placement.on_mesh:
        yield _closed((), x.parts.shape), x.parts
        return
    parts = x.parts if _on_mesh(x.parts) else group.placement.place(x.parts, group.placement.per_replica)
    for one in parts.addressable_shards:
        if one.replica_id == 0:  # some devices of a replica may hold the same
            yield _closed(one.index, parts.shape), one.data


def _everything(name: str, x: Any) -> Portion:
    return Portion(name, x.shape, x.shape, [(_closed((), x.shape), x)])


def _copied(pieces: Iterable[tuple[Index, Any]]) -> list[tuple[Index, np.ndarray]]:
    """Takes copies, for the next step may write where the state lies."""
    return [(place, np.array(x)) for place, x in pieces]


def _laid(group: Group, name: str, x: Any, read: Read) -> Any:
    """Reads this process's pieces into an array like another one."""
    like = word_form(x)
    if is_shard(x):
        parts = _laid_columns(group, name, like, _sharding(group, name, x.parts, apart=True), read)
        return replace(x, parts=of_flat_words(parts, x.parts))

    def piece(place: Any) -> np.ndarray:
        if is_row(group, name):
            return read(name, (group.size, *like.shape[1:]), _own_row(group, like))
        return read(name, like.shape, _closed(place, like.shape))

    if isinstance(x, np.ndarray | np.generic):
        return piece(())
    array = jax.make_array_from_callback(like.shape, _sharding(group, name, x), piece)
    return jax.random.wrap_key_data(array, impl=key_impl(x)) if is_key(x) else array


def _laid_columns(group: Group, name: str, x: Shard, where: Any, read: Read) -> jax.Array:
    """Reads this process's columns of a shard, and fills them up with zeros."""
    lies = _lying(group, x)

    def part(place: Any) -> np.ndarray:
        place = _closed(place, x.parts.shape)
        mine = read(name, lies.dims, lies.of(*_owner(group, lies, place)))
        filled = np.pad(mine, ((0, 0), (0, lies.width - mine.shape[1])))
        return filled.reshape([one.stop - one.start for one in place])

    return jax.make_array_from_callback(x.parts.shape, where, part)


class Lying(NamedTuple):
    """The place of replicas' parts in an array of layers and columns."""

    sharing: Nodes
    """The sets of replicas that each have all of it, or a copy of it."""
    dims: tuple[int, int]
    """The layers, of all copies, and the columns."""
    depth: int
    """Number of layers that a replica has."""
    width: int
    """Number of columns that a replica has, padding included."""

    def of(self, replica: int, rows: slice) -> tuple[slice, slice]:
        """The layers that are these rows of a replica's part, and its columns, without padding."""
        ((node, place),) = [(n, node.index(replica)) for n, node in enumerate(self.sharing) if replica in node]
        layers = node * self.depth % self.dims[0]
        begin, end = (min(self.dims[1], at * self.width) for at in (place, place + 1))
        return slice(layers + rows.start, layers + rows.stop), slice(begin, end)


def _lying(group: Group, x: Shard) -> Lying:
    """Finds how a shard lies; copies of replicas lie behind each other as an array of all, those of nodes as layers."""
    whole_copies = x.copies and x.nodes is None
    sharing = (tuple(range(group.size)),) if whole_copies else group.sharing
    size = prod(stacked(x, group.size).shape if whole_copies else x.shape)
    copies = len(sharing) if x.copies else 1
    width = part_dims(size, len(sharing[0]), x.depth)[-1]
    return Lying(sharing, (copies * x.depth, size // x.depth), x.depth, width)


def _owner(group: Group, lies: Lying, place: Index) -> tuple[int, slice]:
    """The replica whose part lies at a place of the array of all parts, and the rows of its part that do."""
    begin = place[0].start
    a_replica = lies.depth if lies.depth > 1 else max(1, lies.width)
    replica = begin // a_replica if group.placement.on_mesh else group.rank
    if lies.depth == 1:
        return replica, slice(0, 1)
    first = begin % a_replica
    return replica, slice(first, first + place[0].stop - begin)


def _in_order(listed: Listed, name: str, x: Any, read: Read) -> Read:
    """Reads an array in the order of its elements that a leaf has, whoever held parts of it when it was saved."""
    saved = DeviceCut(dims=tuple((number, length) for number, length in listed.cuts.get(name, ())))
    wanted = x.cut if is_shard(x) else UNCUT
    if saved.dims == wanted.dims:
        return read

    @cache
    def whole() -> np.ndarray:
        dims = (saved.parts, *saved.of_device(x.shape))
        return wanted.stacked(saved.joined(read(name, dims, tuple(map(slice, dims))), x.shape))

    return lambda name, dims, place: whole().reshape(dims)[place]


def _own_row(group: Group, x: Any) -> Index:
    return (slice(group.rank, group.rank + 1), *_closed((), x.shape[1:]))


def _closed(place: Index, shape: tuple[int, ...]) -> Index:
    """The same range with its ends in numbers; of dims that are not named all."""
    named = (*place, *[slice(None)] * (len(shape) - len(place)))
    return tuple(slice(*one.indices(n)[:2]) for one, n in zip(named, shape))


def _sharding(group: Group, name: str, x: Any, apart: bool = False) -> Any:
    """Finds where an array lies, or where one of this form would."""
    if isinstance(x, jax.Array):
        return x.sharding if apart else words(x).sharding
    if axes := group.placement.other_axes:
        raise ValueError(
            f"a form does not say where the parts of {name} lie along {', '.join(map(repr, axes))}: restore into a "
            "state from step.init."
        )
    where = group.placement.place(np.zeros(()), REPLICATED).sharding
    if not group.placement.on_mesh:
        return where
    return NamedSharding(where.mesh, group.placement.per_replica if apart or part_of_state(name) in OWN else REPLICATED)


def _on_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)


def _here(x: Any) -> bool:
    return not _on_mesh(x) or x.is_fully_addressable or x.is_fully_replicated
