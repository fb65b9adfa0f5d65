"""The leaves of a state as they are stored: names, forms, and the pieces that a process has.

An array that replicas hold in parts is stored without padding, as layers and columns, of which
each replica has some columns. So any number of replicas can read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fddp.buckets import ShardLayout, is_shard
from fddp.checkpoints.files import Form, Index, Listed, Pieces, Read
from fddp.comm import REPLICATED, Group, add_replica_dim, drop_replica_dim, shortened
from fddp.step import TrainState
from fddp.wording import leaf_name

LOCAL = {
    "hook_state": "the memory of hooks",
    "model_state": "the buffers of each replica",
}
"""The fields of a state that replicas hold with different values. They are not restored on another
number of replicas."""


class Leaf(NamedTuple):
    """A leaf of a state."""

    x: Any
    """An array, or its form; of random keys, their words."""
    rows: bool
    """True if each replica has some rows of the array, and a process those of its replicas."""
    layout: ShardLayout | None = None
    """The layout of the array of which these rows are parts."""
    keys: Any = None
    """The random keys with these words."""


def stacked_buffers(group: Group, state: TrainState, local: Sequence[str]) -> TrainState:
    """Gives buffers that are `local` a first dim over replicas, in arrays or forms."""
    if "model_state" not in local:
        return state
    run = group.placement.program(add_replica_dim, (REPLICATED,), group.placement.per_replica)
    buffers = group.placement.place(state.model_state, REPLICATED)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(buffers)):
        return state._replace(model_state=jax.eval_shape(run, buffers))
    return state._replace(model_state=run(buffers))


def unstacked_buffers(group: Group, state: TrainState, local: Sequence[str]) -> TrainState:
    """Drops the first dim again: the inverse of `stacked_buffers`."""
    if "model_state" not in local:
        return state
    run = group.placement.program(drop_replica_dim, (group.placement.per_replica,), REPLICATED)
    return state._replace(model_state=run(state.model_state))


def named_leaves(state: TrainState, local: Sequence[str]) -> dict[str, Leaf]:
    """Path → leaf of a state; the fields in `local` have a first dim over replicas."""
    leaves = dict[str, Leaf]()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shard):
        name = leaf_name(path)
        if name in leaves:
            raise ValueError(
                f"two leaves of the state are called {name!r}, and only one would be saved: rename "
                "a key."
            )
        rows, layout = field_of(name) in local, None
        if is_shard(x):
            x, rows, layout = x.parts, True, x.layout
        if not hasattr(x, "dtype"):  # a user's number
            x = np.asarray(x, jnp.result_type(x))
        leaves[name] = Leaf(x, rows, layout)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            is_form = isinstance(x, jax.ShapeDtypeStruct)
            words = jax.eval_shape(jax.random.key_data, x) if is_form else jax.random.key_data(x)
            leaves[name] = Leaf(words, rows, keys=x)
    return leaves


def field_of(name: str) -> str:
    return name.split("/")[0]


def stored_dims(group: Group, leaf: Leaf) -> tuple[int, ...]:
    """Dims of an array as it is stored: layers and columns, if replicas hold it in parts."""
    if leaf.layout:
        return leaf.layout.depth, leaf.layout.layer_size
    dims = leaf.x.shape
    if leaf.rows:
        return (dims[0] // group.placement.replicas_in_array * group.size, *dims[1:])
    return dims


def stored_form(group: Group, leaf: Leaf) -> Form:
    """Dtype, dims, and dims as it is stored, of the whole array or the rows of all replicas."""
    dims = stored_dims(group, leaf)
    shape = leaf.layout.shape if leaf.layout else dims
    return str(leaf.x.dtype), list(shape), list(dims)


def check_fits(
    group: Group, listed: Listed, leaves: Mapping[str, Leaf], local: Sequence[str]
) -> set[str]:
    """Refuses a checkpoint of other leaves; returns the names of leaves that are not restored."""
    saved_replicas = listed.values["replicas"]
    skipped = local if saved_replicas != group.size else ()
    # Dicts, for lookups: searches in lists of thousands of leaves would take seconds.
    forms = {name: stored_form(group, leaf) for name, leaf in leaves.items()}
    required = _described(forms, skipped)
    saved = _described(listed.forms, skipped)
    extra = [x for x in saved if x not in required]
    missing = [x for x in required if x not in saved]
    retained = {name for name in leaves if field_of(name) in skipped}
    if not extra and not missing:
        if any(isinstance(leaves[name].x, jax.ShapeDtypeStruct) for name in retained):
            raise ValueError(
                f"the checkpoint is of {saved_replicas} replicas and these are {group.size}: "
                f"{words_of(retained)} cannot be restored, so give a state from step.init."
            )
        return retained
    advice = ""
    if saved_replicas != group.size and any(
        leaf.rows and leaf.layout is None and name not in retained for name, leaf in leaves.items()
    ):
        advice = (
            f"; fddp.local_steps continues only on the same number of replicas, {saved_replicas}"
        )
    raise ValueError(
        f"the checkpoint of step {listed.values['step']} is of another training: it has "
        f"{shortened(extra) or 'nothing else'}, and lacks {shortened(missing) or 'nothing'}"
        f"{advice}."
    )


def words_of(names: Sequence[str] | set[str]) -> str:
    """Lists the fields of local values among some names of leaves."""
    fields = set(map(field_of, names))
    return " and ".join(words for field, words in LOCAL.items() if field in fields)


def _described(forms: Mapping[str, Form], skipped: Sequence[str]) -> dict[str, None]:
    return {
        f"{name} {dtype}{list(dims)}": None
        for name, (dtype, dims, _) in forms.items()
        if field_of(name) not in skipped
    }


def is_distributed(group: Group, leaf: Leaf) -> bool:
    """True if rank 0 holds less than all of an array; equal on all ranks."""
    if group.processes == 1:
        return False
    return leaf.rows or (_on_mesh(leaf.x) and not leaf.x.is_fully_replicated)


def local_pieces(group: Group, leaf: Leaf) -> Pieces:
    """Copies the pieces of an array that this process writes; of replicated arrays rank 0's."""
    x = leaf.x
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
    """Reads a checkpoint into a state like `like`; each process reads its own pieces."""
    # `like` has arrays, or forms from `step.shapes`. The fields in `local` are those of `like` on
    # another number of replicas.
    leaves = named_leaves(like, local)
    retained = check_fits(group, listed, leaves, local)
    restored, tree = jax.tree.flatten(like, is_leaf=is_shard)
    for k, (name, leaf) in enumerate(leaves.items()):
        if name not in retained:
            array = _read_like(group, name, leaf, read)
            restored[k] = replace(restored[k], parts=array) if is_shard(restored[k]) else array
    return tree.unflatten(restored)


def _read_like(group: Group, name: str, leaf: Leaf, read: Read) -> Any:
    """Reads this process's pieces into an array like that of `leaf`."""
    shape, layout = leaf.x.shape, leaf.layout

    def piece(index: Any) -> np.ndarray:
        place = _place(group, leaf, index, shape)
        dims = stored_dims(group, leaf)
        if layout is None:
            return read(name, dims, place)
        x = read(name, dims, _columns(layout, place))
        padding = layout.dims[-1] - x.shape[1]
        return np.pad(x, ((0, 0), (0, padding))).reshape(layout.dims)

    if isinstance(leaf.x, np.ndarray | np.generic) and not leaf.rows:
        return piece(())
    array = jax.make_array_from_callback(shape, _sharding(group, name, leaf), piece)
    if leaf.keys is None:
        return array
    impls = list[Any]()
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), leaf.keys)
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
        return leaf.x.sharding
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
