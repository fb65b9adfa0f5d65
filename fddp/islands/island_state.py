"""An island's side of a merge: its pseudo-gradient, and its state after the exchange.

NumPy computes both on the host, where the messages start and end, so that the bits do not depend on
the island's device. Each process of an island computes the same result.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import Shard, is_shard, leaves_with_shards
from fddp.comm import Group
from fddp.islands.merging import Contribution, Leaves, SharedParams
from fddp.jaxpr import with_trained
from fddp.local_training import LocalSteps, array_of
from fddp.step import IslandState, Replica, TrainState


@dataclass(frozen=True)
class Island:
    """An island, as seen by one of its processes."""

    replica: Replica
    """One of its replicas."""
    number: int
    places: tuple[int, ...]
    """Positions of this process's replicas within the island."""
    members: Group
    """Its processes; the first one talks to the server."""

    def contribution(self, state: TrainState) -> Contribution:
        """Computes the pseudo-gradient, after waiting for the state; collective in the island."""
        opt_state: IslandState = state.opt_state
        pairs = zip(copy_leaves(opt_state.shared), self._whole(self._trained(state.params)))
        change = [old - new for old, new in pairs]
        weight = float(_here(opt_state.weight)[0])
        return Contribution(self.number, version_of(state), weight, int(_here(state.step)), change)

    def landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """Mixes received parameters into the state, with a share `mix` of the local ones.

        It also resets the weight. If `newest` has no outer state, the old one remains. Collective
        in the island.
        """
        previous: IslandState = state.opt_state
        trained = self._trained(state.params)
        mixed = newest.params
        if mix:
            pairs = zip(self._whole(trained), mixed)
            mixed = [(new + mix * (old - new)).astype(new.dtype) for old, new in pairs]
        outer = previous.outer
        if newest.outer:
            outer = self._put(outer, newest.outer)
        opt_state = previous._replace(
            shared=self._put(previous.shared, newest.params),
            version=self._put(previous.version, [np.int32(newest.version)]),
            outer=outer,
            weight=self._put(previous.weight, [np.zeros_like(_here(previous.weight))]),
        )
        params = with_trained(state.params, self._put(trained, mixed))
        return state._replace(params=params, opt_state=opt_state)

    def _trained(self, params: PyTree) -> Any:
        """Replaces untrained parameters by None."""
        return jax.tree.map(lambda x: x if is_shard(x) else None, params, is_leaf=is_shard)

    def _whole(self, tree: PyTree) -> list[np.ndarray]:
        """Copies the island's arrays to the host, gathered from shards."""

        def whole(x: Shard) -> np.ndarray:
            if x.nodes is None or not x.parts.size:
                return _here(x)
            pieces = sorted(x.parts.addressable_shards, key=lambda piece: piece.index[0].start or 0)
            local_rows = np.stack([np.asarray(piece.data) for piece in pieces])
            rows = jnp.asarray(self.members.all_gather(local_rows)).reshape(
                -1, *local_rows.shape[1:]
            )
            return np.asarray(x.layout.join(rows))

        return list(map(whole, leaves_with_shards(tree)))

    def _put(self, like: Any, leaves: Leaves) -> Any:
        """Places new copies of arrays on this process's replicas, laid out as in a tree."""
        placement = self.replica.group.placement

        def put(shard: Shard, x: Any) -> Shard:
            if shard.nodes is None:
                rows = [np.reshape(x, -1)] * len(self.places)
            else:
                rows = [shard.layout.part(x, jnp.int32(place)) for place in self.places]
            array = jnp.array(np.concatenate(rows))
            return replace(shard, parts=placement.place(array, placement.per_replica))

        shards, tree = jax.tree.flatten(like, is_leaf=is_shard)
        return tree.unflatten(list(map(put, shards, leaves)))


def island_of(steps: LocalSteps, replica: Replica) -> Island:
    """Finds the island of this process; collective in the island.

    It raises ValueError if a process has replicas of several islands.
    """
    group = replica.group
    per_process = group.size // group.processes
    size = steps.replicas(group.parts)
    if size % per_process:
        raise ValueError(
            "an asynchronous island is one process or several, and this group has "
            f"{group.size} replicas in {group.processes}, with islands of {size}: start a process "
            f"for each island, give local_steps island= a multiple of {per_process}, or use "
            "fddp.simulate_islands."
        )
    first = group.rank * per_process
    islands = [(k,) for k in range(group.size)]
    if group.nodes and size > 1:
        islands = group.nodes
    number = next(k for k, replicas in enumerate(islands) if first in replicas)
    replicas = islands[number]
    places = tuple(replicas.index(first + k) for k in range(per_process))
    members = group.subgroup(sorted({k // per_process for k in replicas}))
    return Island(replica, number, places, members)


def version_of(state: TrainState) -> int:
    """Version of the shared parameters that an island received last."""
    return int(_here(state.opt_state.version))


def copy_leaves(tree: PyTree) -> list[np.ndarray]:
    """Copies arrays that each replica of an island holds whole to the host."""
    return list(map(_here, leaves_with_shards(tree)))


def _here(x: Any) -> np.ndarray:
    array = array_of(x)
    if isinstance(array, jax.Array):
        array = array.addressable_shards[0].data
    return np.asarray(array).reshape(x.shape)
