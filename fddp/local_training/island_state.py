"""An island's side of a merge: what it has learned since it began, and the shared parameters that it goes on with.

Both are computed with NumPy on the host, where the parameters travel from and to, so that they have the same bits
wherever the island trains. Each process of an island does so, with the same result.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Shard, is_shard, of_rows, own_part
from fddp.comm import Group
from fddp.local_training.merging import Contribution, Leaves, SharedParams
from fddp.optim import IslandState, LocalSteps
from fddp.step import Replica, TrainState, with_trained


@dataclass(frozen=True)
class Island:
    """An island, from the point of view of one of its processes."""

    replica: Replica
    """One of its replicas."""
    number: int
    places: tuple[int, ...]
    """Numbers of this process's replicas, counted inside of the island."""
    members: Group
    """Its processes; the first of them speaks with the keeper."""

    def contribution(self, state: TrainState) -> Contribution:
        """The pseudo-gradient, and what goes with it; every process of the island calls it.

        Args:
          state: the island's.

        Returns:
          The contribution; it waits for the state to be there.
        """
        held: IslandState = state.opt_state
        pairs = zip(leaves_of(held.shared), self._whole(self._trained(state.params)))
        weight = float(_here(held.weight)[0])
        return Contribution(self.number, version_of(state), weight, number_of(state), [old - new for old, new in pairs])

    def landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """The state with which the island goes on; every process of the island calls it.

        Args:
          mix: share of its own parameters that it keeps.
          state: the island's.
          newest: the shared parameters; without a state of the outer optimizer its own stays as it is.

        Returns:
          The state; it has trained on nothing yet since.
        """
        held: IslandState = state.opt_state
        trained = self._trained(state.params)
        own = self._whole(trained) if mix else newest.params
        mixed = [(new + mix * (old - new)).astype(new.dtype) if mix else new for old, new in zip(own, newest.params)]
        opt_state = held._replace(
            shared=self._put(held.shared, newest.params),
            version=self._put(held.version, [np.int32(newest.version)]),
            outer=self._put(held.outer, newest.outer) if newest.outer else held.outer,
            weight=self._put(held.weight, [np.zeros_like(_here(held.weight))]),
        )
        params = with_trained(state.params, self._put(trained, mixed))
        return state._replace(params=params, opt_state=opt_state)

    def _trained(self, params: Any) -> Any:
        """The parameters that are trained, in shards, None in place of others."""
        return jax.tree.map(lambda x: x if is_shard(x) else None, params, is_leaf=is_shard)

    def _whole(self, tree: Any) -> list[np.ndarray]:
        """The island's own arrays, on the host; those of which each replica holds a part are gathered."""

        def whole(x: Shard) -> np.ndarray:
            if x.nodes is None or not x.parts.size:
                return _here(x)
            pieces = sorted(x.parts.addressable_shards, key=lambda one: one.index[0].start or 0)
            mine = np.stack([np.asarray(piece.data) for piece in pieces])
            rows = jnp.asarray(self.members.all_gather(mine)).reshape(-1, *mine.shape[1:])
            return np.asarray(of_rows(rows, x.shape, x.depth))

        return [whole(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]

    def _put(self, like: Any, leaves: Leaves) -> Any:
        """Puts arrays where this process's replicas hold a tree's, in memory that nothing else uses."""
        placement = self.replica.group.placement
        count = self.replica.group.parts

        def put(shard: Shard, x: Any) -> Shard:
            flat = np.reshape(x, -1)
            rows = [flat] * len(self.places)
            if shard.nodes is not None:
                rows = [np.asarray(own_part(x, count, jnp.int32(place), shard.depth)) for place in self.places]
            return replace(shard, parts=placement.place(jnp.array(np.concatenate(rows)), placement.per_replica))

        shards, tree = jax.tree.flatten(like, is_leaf=is_shard)
        return tree.unflatten(list(map(put, shards, leaves)))


def island_of(steps: LocalSteps, replica: Replica) -> Island:
    """Finds the island of this process; its processes call it together.

    Args:
      steps: the optimizer.
      replica: one of this process's.

    Returns:
      The island.

    Raises:
      ValueError: a process has replicas of several islands.
    """
    group = replica.group
    each = group.size // group.processes
    size = steps.replicas(group.parts)
    if size % each:
        raise ValueError(
            f"an island that does not wait is a process, or several, and this group has {group.size} replicas in "
            f"{group.processes}, with islands of {size}: start a process for each island, give local_steps island= a "
            f"multiple of {each}, or let fddp.simulate_islands show what they would do."
        )
    islands = group.nodes if group.nodes and size > 1 else [(k,) for k in range(group.size)]
    ((number, mine),) = [(k, among) for k, among in enumerate(islands) if group.rank * each in among]
    places = tuple(mine.index(group.rank * each + k) for k in range(each))
    return Island(replica, number, places, group.subgroup(sorted({one // each for one in mine})))


def number_of(state: TrainState) -> int:
    """The number of steps that an island has made."""
    return int(_here(state.step))


def version_of(state: TrainState) -> int:
    """The version of the shared parameters that an island has taken last."""
    return int(_here(state.opt_state.version))


def leaves_of(tree: Any) -> list[np.ndarray]:
    """An island's own arrays, on the host, of which each replica has a copy."""
    return [_here(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]


def _here(x: Any) -> np.ndarray:
    array = x.parts if is_shard(x) else x
    local = array.addressable_shards[0].data if isinstance(array, jax.Array) else array
    return np.asarray(local).reshape(x.shape)
