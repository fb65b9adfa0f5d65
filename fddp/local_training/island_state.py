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

from fddp.buckets import Shard, is_shard, of_rows, own_part
from fddp.comm import Group
from fddp.local_training.merging import Contribution, Leaves, SharedParams
from fddp.optim import IslandState, LocalSteps
from fddp.step import Replica, TrainState, with_trained


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
        weight = float(_here(opt_state.weight)[0])
        return Contribution(
            self.number,
            version_of(state),
            weight,
            number_of(state),
            [old - new for old, new in pairs],
        )

    def landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """Mixes received parameters into the state, with a share `mix` of the local ones.

        It also resets the weight. If `newest` has no outer state, the old one remains. Collective
        in the island.
        """
        previous: IslandState = state.opt_state
        trained = self._trained(state.params)
        local_params = self._whole(trained) if mix else newest.params
        mixed = [
            (new + mix * (old - new)).astype(new.dtype) if mix else new
            for old, new in zip(local_params, newest.params)
        ]
        opt_state = previous._replace(
            shared=self._put(previous.shared, newest.params),
            version=self._put(previous.version, [np.int32(newest.version)]),
            outer=self._put(previous.outer, newest.outer) if newest.outer else previous.outer,
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
            return np.asarray(of_rows(rows, x.shape, x.depth))

        return [whole(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]

    def _put(self, like: Any, leaves: Leaves) -> Any:
        """Places new copies of arrays on this process's replicas, laid out as in a tree."""
        placement = self.replica.group.placement
        count = self.replica.group.parts

        def put(shard: Shard, x: Any) -> Shard:
            flat = np.reshape(x, -1)
            rows = [flat] * len(self.places)
            if shard.nodes is not None:
                rows = [
                    np.asarray(own_part(x, count, jnp.int32(place), shard.depth))
                    for place in self.places
                ]
            return replace(
                shard, parts=placement.place(jnp.array(np.concatenate(rows)), placement.per_replica)
            )

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
    islands = group.nodes if group.nodes and size > 1 else [(k,) for k in range(group.size)]
    ((number, replicas),) = [
        (k, numbers) for k, numbers in enumerate(islands) if group.rank * per_process in numbers
    ]
    places = tuple(replicas.index(group.rank * per_process + k) for k in range(per_process))
    return Island(
        replica, number, places, group.subgroup(sorted({k // per_process for k in replicas}))
    )


def number_of(state: TrainState) -> int:
    """Number of steps of an island."""
    return int(_here(state.step))


def version_of(state: TrainState) -> int:
    """Version of the shared parameters that an island received last."""
    return int(_here(state.opt_state.version))


def copy_leaves(tree: PyTree) -> list[np.ndarray]:
    """Copies arrays that each replica of an island holds whole to the host."""
    return [_here(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]


def _here(x: Any) -> np.ndarray:
    array = x.parts if is_shard(x) else x
    local = array.addressable_shards[0].data if isinstance(array, jax.Array) else array
    return np.asarray(local).reshape(x.shape)
