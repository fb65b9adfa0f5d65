"""A replica within an island, whose replicas train jointly and have a state of their own.

Each replica holds a local copy of the arrays that its island changes. Where an island shards its
state, the shards of its replicas make up the copy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from fddp.buckets import Shard, insert_shards, is_shard, map_shards, whole_forms
from fddp.comm import Group
from fddp.losses import Joined
from fddp.losses import Shared as Alike
from fddp.step import Copy, Cut, Replica, TrainState, Way


class Trains(NamedTuple):
    """The optimizer state of a step within an island."""

    opt_state: Any
    """State of the inner optimizer."""
    weight: Float[Array, " means"]
    """Σ w that the island has trained on since the last mean of each kind (`LocalState.weight`)."""


def within_island(replica: Replica, way: Way) -> Replica:
    """Restricts a replica to its island, which holds its state in the given way.

    The nodes of the replica's group are the islands.
    """
    group = replica.group
    carriers = {
        "communicator": group.communicator.at("node"),
        "transport": group.transport.at("node"),
    }
    return replace(replica, group=replace(group, size=group.parts, **carriers), way=way)


def parts_held(
    way: Way, replica: Replica, trained: PyTree, opt_state: PyTree, cut: Cut
) -> tuple[Any, Any]:
    """Cuts the parameters and the inner optimizer's state that replicas of an island share."""
    params, opt_state, _ = way.hold(replica, (trained, opt_state, None), cut, lambda x: x)
    params = jax.tree.map(lambda x, part: x if part is None else part, trained, params)
    return params, opt_state


def copies_held(tree: PyTree, copy: Copy) -> Any:
    """Replaces plain arrays by local copies."""
    return jax.tree.map(lambda x: x if is_shard(x) else copy(x), tree, is_leaf=is_shard)


def own_view(state: TrainState, shards: Sequence[Array]) -> TrainState:
    """Returns the state of one replica's island, with `Trains` as optimizer state.

    Arrays that the replicas of an island share stay shards.
    """
    view: TrainState = own_copies(insert_shards(state, shards))
    return view._replace(opt_state=Trains(view.opt_state.inner, view.opt_state.weight))


def own_copies(tree: PyTree) -> Any:
    """Replaces local copies by this replica's plain arrays."""

    def own(x: Shard) -> Any:
        return x.parts.reshape(x.shape) if x.nodes is None else x

    return map_shards(own, tree)


def array_of(x: Any) -> Any:
    """Returns the array of a shard; arrays are returned unchanged."""
    return x.parts if is_shard(x) else x


def with_array(x: Any, array: Array) -> Any:
    """Replaces the array of a shard, or a plain array."""
    return replace(x, parts=array) if is_shard(x) else array


def trained_leaves(replica: Replica, params: PyTree) -> Any:
    """Replaces untrained leaves, sharded or not, by None."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_shard)
    chosen = replica.chosen(whole_forms(params))
    return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])


def whole_view(group: Group, view: TrainState) -> TrainState:
    """Gathers whole parameters inside the island."""
    gather = group.communicator.at("node").all_gather

    def whole(x: Shard) -> Array:
        return x.layout.join(gather(x.parts) if x.parts.size else x.parts)

    return view._replace(params=map_shards(whole, view.params))


def own_rows(rows: PyTree) -> Any:
    """Counts only rows with data in the divisor, since islands train separately."""
    if isinstance(rows, Joined):
        rows = rows._replace(divisor=rows.share)
    return rows


def keys_of_island(group: Group, rng: PyTree) -> Any:
    """Folds the island's number into random keys, except those that all replicas share.

    The replica's number, which a step folds in later, counts within the island.
    """
    number = group.communicator.at("network").replica_index()

    def fold(key: Any) -> Any:
        return key if isinstance(key, Alike) else jax.random.fold_in(key, number)

    return jax.tree.map(fold, rng, is_leaf=lambda x: isinstance(x, Alike))
