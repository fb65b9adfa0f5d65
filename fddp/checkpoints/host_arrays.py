"""A state as arrays of hosts that are written to files, and back: over any backend, to as many replicas or to others.

What replicas hold apart is an array of which each process writes the pieces that it has: of a shard some columns, with
a row for each layer that is cut by itself. What is equal on all is written by rank 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from fddp.buckets import Shard, is_shard, part_dims, stacked
from fddp.checkpoints.files import Listed
from fddp.checkpoints.state_forms import (
    OWN,
    check_fits,
    is_key,
    is_row,
    key_impl,
    named,
    part_of_state,
    word_form,
    words,
)
from fddp.checkpoints.stored_arrays import Index, Portion, Read
from fddp.comm import REPLICATED, Group, Nodes
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
        x = words(whole(stacked(x, group.size) if is_shard(x) else x, group=group))
        if is_row(group, name):
            x = np.concatenate(group.all_gather(x))
        elif not _here(x):
            x = jax.block_until_ready(_gathering(x.sharding.mesh)(x))
        if group.rank == 0 and x.size:
            portions.append(_everything(name, np.array(x)))
    return portions


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
      ValueError: the checkpoint is of another model, optimizer or hook, or has gradients pending and `like` has not.
    """
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

    tree = jax.tree.structure(like, is_leaf=is_shard)
    return tree.unflatten([x if name in forgotten else _laid(group, name, x, filled) for name, x in leaves.items()])


def _held(group: Group, name: str, x: Any) -> Portion:
    """An array, and the pieces of it that this process writes."""
    if is_shard(x):
        return _held_columns(group, name, x)
    x = words(x)
    if is_row(group, name):
        return Portion(name, (group.size, *x.shape[1:]), x.shape, [(_own_row(group, x), x)])
    if _on_mesh(x):
        pieces = [(_closed(one.index, x.shape), one.data) for one in x.addressable_shards if one.replica_id == 0]
        return Portion(name, x.shape, x.sharding.shard_shape(x.shape), pieces)
    return _everything(name, x) if group.rank == 0 else Portion(name, x.shape, x.shape, ())


def _held_columns(group: Group, name: str, x: Shard) -> Portion:
    """The columns of a shard that this process writes, without padding: the first of the nodes that have all of it."""
    depth, columns, width = _columns(group, x)
    first = _sharing(group, x)[0]
    pieces = list[tuple[Index, Any]]()
    for replica, part in _own_parts(group, x):
        begin, end = _range(first.index(replica), columns, width) if replica in first else (0, 0)
        if begin < end:
            mine = np.asarray(part).reshape(depth, width)[:, : end - begin]
            pieces.append(((slice(0, depth), slice(begin, end)), mine))
    return Portion(name, (depth, columns), (depth, width), pieces)


def _own_parts(group: Group, x: Shard) -> Iterator[tuple[int, Any]]:
    """The parts that this process holds, each with the number of its replica."""
    if not group.placement.on_mesh:
        yield group.rank, x.parts
        return
    parts = x.parts if _on_mesh(x.parts) else group.placement.place(x.parts, group.placement.per_replica)
    for one in parts.addressable_shards:
        yield _replica(one.index, one.data.shape), one.data


def _everything(name: str, x: Any) -> Portion:
    return Portion(name, x.shape, x.shape, [(_closed((), x.shape), x)])


def _copied(pieces: Iterable[tuple[Index, Any]]) -> list[tuple[Index, np.ndarray]]:
    """Takes copies, for the next step may write where the state lies."""
    return [(place, np.array(x)) for place, x in pieces]


def _laid(group: Group, name: str, x: Any, read: Read) -> Any:
    """Reads this process's pieces into an array like another one."""
    if is_shard(x):
        return replace(x, parts=_laid_columns(group, name, x, read))
    like = word_form(x)

    def piece(place: Any) -> np.ndarray:
        if is_row(group, name):
            return read(name, (group.size, *like.shape[1:]), _own_row(group, like))
        return read(name, like.shape, _closed(place, like.shape))

    if isinstance(x, np.ndarray | np.generic):
        return piece(())
    array = jax.make_array_from_callback(like.shape, _sharding(group, name, x), piece)
    return jax.random.wrap_key_data(array, impl=key_impl(x)) if is_key(x) else array


def _laid_columns(group: Group, name: str, x: Shard, read: Read) -> jax.Array:
    """Reads this process's columns of a shard, and fills them up with zeros."""
    depth, columns, width = _columns(group, x)
    places = {replica: place for node in _sharing(group, x) for place, replica in enumerate(node)}
    count = group.placement.replicas_in_array
    dims = (x.parts.shape[0] // count, *x.parts.shape[1:])

    def part(place: Any) -> np.ndarray:
        replica = _replica(place, dims) if group.placement.on_mesh else group.rank
        begin, end = _range(places[replica], columns, width)
        mine = read(name, (depth, columns), (slice(0, depth), slice(begin, end)))
        return np.pad(mine, ((0, 0), (0, width - mine.shape[1]))).reshape(dims)

    return jax.make_array_from_callback(x.parts.shape, _sharding(group, name, x.parts, apart=True), part)


def _columns(group: Group, x: Shard) -> tuple[int, int, int]:
    """The layers of a shard, the columns of each, and how many of them a replica holds, padding included."""
    size = prod(stacked(x, group.size).shape)
    return x.depth, size // x.depth, part_dims(size, len(_sharing(group, x)[0]), x.depth)[-1]


def _sharing(group: Group, x: Shard) -> Nodes:
    """The sets of replicas that each have all of a shard; of copies all replicas together have all."""
    return (tuple(range(group.size)),) if x.copies else group.sharing


def _range(place: int, columns: int, width: int) -> tuple[int, int]:
    """The columns that a replica of this place holds, padding left out."""
    return min(columns, place * width), min(columns, (place + 1) * width)


def _replica(place: Index, dims: tuple[int, ...]) -> int:
    """The number of the replica whose part of these dims lies there."""
    return (place[0].start or 0) // max(1, dims[0])


def _own_row(group: Group, x: Any) -> Index:
    return (slice(group.rank, group.rank + 1), *_closed((), x.shape[1:]))


def _closed(place: Index, shape: tuple[int, ...]) -> Index:
    """The same range with its ends in numbers; of dims that are not named all."""
    named = (*place, *[slice(None)] * (len(shape) - len(place)))
    return tuple(slice(*one.indices(n)[:2]) for one, n in zip(named, shape))


@cache
def _gathering(mesh: Any) -> Any:
    """Makes a program for each mesh, not for each array that is saved."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))


def _sharding(group: Group, name: str, x: Any, apart: bool = False) -> Any:
    """Finds where an array lies, or where one of this form would."""
    if isinstance(x, jax.Array):
        return words(x).sharding
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
