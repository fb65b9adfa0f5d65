"""A replica inside of an island: replicas that train together, with a state that is their island's own.

What an island changes is held as copies: each replica has one for itself. Where the replicas of an island share the
state, the parts of each island make up its copy.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from fddp.buckets import Shard, is_shard, join, of_rows, whole_forms
from fddp.comm import Group
from fddp.losses import Joined
from fddp.losses import Shared as Alike
from fddp.optim import IslandState, LocalState
from fddp.step import Copy, Cut, Held, Replica, TrainState, Way


class Trains(NamedTuple):
    """The state that the replicas of an island have beside parameters and buffers."""

    opt_state: Any
    """State of the inner optimizer."""
    weight: Float[Array, " means"]
    """Σ w that the island has trained on since the last mean of each kind (`LocalState.weight`)."""


def inside(replica: Replica, way: Way) -> Replica:
    """Makes of a replica one that knows of no other island.

    Args:
      replica: one of all.
      way: the way in which the replicas of an island hold a state.

    Returns:
      The replica; the nodes of its group are the islands.
    """
    group = replica.group
    carriers = {"communicator": group.communicator.at("node"), "transport": group.transport.at("node")}
    return replace(replica, group=replace(group, size=group.parts, **carriers), way=way)


def hold(way: Way, replica: Replica, trained: Any, opt_state: Any, model_state: Any, cut: Cut, copy: Copy) -> Held:
    """Holds an island's own state: in parts what its replicas share, in copies all else that they change.

    Args:
      way: of the replicas of an island.
      replica: one of all.
      trained: the parameters that are trained, None in place of others.
      opt_state: a `LocalState` or an `IslandState`.
      model_state: the buffers.
      cut: cuts an array into parts.
      copy: makes a copy.

    Returns:
      What is held.
    """
    group = replica.group

    def cut_in_each(x: Any, leaf: int) -> Shard:
        return replace(cut(x, leaf), copies=True, ranks=group.copy_ranks, nodes=group.nodes)

    def kept(x: Any) -> Shard:
        return x if is_shard(x) else copy(x)

    params, inner, _ = way.hold(replica, trained, opt_state.inner, model_state, cut_in_each, copy)
    params = jax.tree.map(lambda x, part: copy(x) if part is None else part, trained, params)
    inner = jax.tree.map(kept, inner, is_leaf=is_shard)
    held = shared_held(opt_state, copy)._replace(inner=inner, weight=copy(opt_state.weight))
    return params, held, jax.tree.map(copy, model_state)


def shared_held(opt_state: Any, copy: Copy) -> Any:
    """Holds shared parameters: islands that do not wait have each taken others, so that these are an island's own."""
    if isinstance(opt_state, LocalState):
        return opt_state
    shared, version, outer, *others = opt_state
    return IslandState(*jax.tree.map(copy, (shared, version, outer)), *others)


def own_view(state: TrainState, shards: Any) -> TrainState:
    """A state as one replica sees it whose island trains alone: its own parameters, inner state and buffers.

    Args:
      state: what is equal on all replicas.
      shards: what is not.

    Returns:
      The state, with `Trains` for the optimizer; in shards is what the replicas of an island share.
    """
    held: TrainState = own_copies(join(state, shards))
    return held._replace(opt_state=Trains(held.opt_state.inner, held.opt_state.weight))


def own_copies(held: Any) -> Any:
    """A replica's own arrays in place of copies, the rest as it is."""

    def own(x: Any) -> Any:
        return x.parts.reshape(x.shape) if is_shard(x) and x.nodes is None else x

    return jax.tree.map(own, held, is_leaf=is_shard)


def trained_leaves(replica: Replica, params: Any) -> Any:
    """The tree with None in place of leaves that are not trained, whether leaves are shards or not."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_shard)
    chosen = replica.chosen(whole_forms(params))
    return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])


def whole_view(group: Group, view: TrainState) -> TrainState:
    """The same with whole parameters, which are gathered inside of the island."""
    gather = group.communicator.at("node").all_gather

    def whole(x: Any) -> Any:
        if not is_shard(x):
            return x
        rows = gather(x.parts) if x.parts.size else x.parts
        return of_rows(rows, x.shape, x.depth)

    return view._replace(params=jax.tree.map(whole, view.params, is_leaf=is_shard))


def own_rows(rows: Any) -> Any:
    """Rows as an island counts them that trains alone: without data for nothing, whatever the others divide by."""
    return rows._replace(divisor=rows.share) if isinstance(rows, Joined) else rows


def keys_of_island(group: Group, rng: Any) -> Any:
    """Random keys of an island, inside of which replicas are numbered anew; where all draw alike they do so still."""
    number = group.communicator.at("network").replica_index()

    def fold(key: Any) -> Any:
        return key if isinstance(key, Alike) else jax.random.fold_in(key, number)

    return jax.tree.map(fold, rng, is_leaf=lambda x: isinstance(x, Alike))
