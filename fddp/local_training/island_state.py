"""An island's side of a merge: what it has learned since it began, and the shared parameters that it goes on with.

Both are computed with NumPy on the host, where the parameters travel from and to, so that they have the same bits
wherever the island trains.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Shard, is_shard
from fddp.comm import Placement
from fddp.local_training.merging import Contribution, Leaves
from fddp.optim import IslandState
from fddp.step import Replica, TrainState, with_trained


def contribution(replica: Replica, island: int, state: TrainState) -> Contribution:
    """The pseudo-gradient of an island, and what goes with it.

    Args:
      replica: what one replica does.
      island: the island's number.
      state: the island's.

    Returns:
      The contribution; it waits for the state to be there.
    """
    held: IslandState = state.opt_state
    shared = leaves_of(held.shared)
    own = leaves_of(replica.trained(state.params))
    change = [old - new for old, new in zip(shared, own)]
    return Contribution(island, version_of(state), float(_here(held.weight)[0]), int(_here(state.step)), change)


def landed(replica: Replica, mix: float, state: TrainState, version: int, shared: Leaves) -> TrainState:
    """The state with which an island goes on.

    Args:
      replica: what one replica does.
      mix: share of its own parameters that it keeps.
      state: the island's.
      version: of the shared parameters.
      shared: the leaves of these.

    Returns:
      The state; it has trained on nothing yet since.
    """
    placement = replica.group.placement
    trained = replica.trained(state.params)
    tree = jax.tree.structure(trained, is_leaf=is_shard)
    own = leaves_of(trained) if mix else shared
    mixed = [(new + mix * (old - new)).astype(new.dtype) if mix else new for old, new in zip(own, shared)]
    put = [_put(placement, *pair) for pair in zip(tree.flatten_up_to(trained), mixed)]
    held: IslandState = state.opt_state
    kept = [_put(placement, *pair) for pair in zip(jax.tree.leaves(held.shared, is_leaf=is_shard), shared)]
    opt_state = held._replace(
        shared=tree.unflatten(kept),
        version=_put(placement, held.version, np.int32(version)),
        weight=_put(placement, held.weight, np.zeros_like(_here(held.weight))),
    )
    return state._replace(params=with_trained(state.params, tree.unflatten(put)), opt_state=opt_state)


def version_of(state: TrainState) -> int:
    """The version of the shared parameters that an island has taken last."""
    return int(_here(state.opt_state.version))


def leaves_of(tree: Any) -> list[np.ndarray]:
    """An island's own arrays, on the host."""
    return [_here(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]


def _here(x: Any) -> np.ndarray:
    array = x.parts if is_shard(x) else x
    local = array.addressable_shards[0].data if isinstance(array, jax.Array) else array
    return np.asarray(local).reshape(x.shape)


def _put(placement: Placement, like: Any, x: Any) -> Shard:
    """Puts an array where this island holds its own, in memory that nothing else uses."""
    row = jnp.array(np.reshape(x, -1))
    return Shard(placement.place(row, placement.per_replica), like.shape, like.copies, like.ranks, like.depth)
