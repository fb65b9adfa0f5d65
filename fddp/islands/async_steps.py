"""Local steps of islands that do not wait for each other: the optimizer, with its merge rule."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.islands.client import join_server
from fddp.islands.island_runner import islands
from fddp.islands.quorum import Quorum
from fddp.local_training import LocalSteps, SyncSteps
from fddp.step import IslandState, StepOptimizer, Way


@dataclass(frozen=True, repr=False)
class AsyncSteps(LocalSteps):
    """Local steps of islands that do not wait for each other."""

    quorum: Quorum = field(kw_only=True)
    """The merge rule."""

    def __repr__(self) -> str:
        """Shows the merge rule as a further option."""
        return f"{super().__repr__().removesuffix(')')}, {self.quorum})"

    def init(self, params: PyTree) -> Any:
        """Initializes both optimizers."""
        _, outer, inner, weight = super().init(params)
        if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(outer)):
            raise ValueError(
                "local_steps: the outer optimizer's state has a random key, and with a quorum "
                "it is kept by a process that holds numbers alone: give an outer optimizer "
                "without one."
            )
        return IslandState(params, jnp.zeros((), jnp.int32), outer, inner, weight)

    def on(self, group: Group) -> tuple[StepOptimizer, Group]:
        """Makes each island a node of the group; see `among` for the optimizer. Collective."""
        _, group = super().on(group)
        return self.among(group.size // self.replicas(group.parts)), group

    def among(self, islands: int) -> LocalSteps:
        """Drops the quorum if all islands wait for each other anyway; raises if it exceeds them."""
        if self.quorum.count > islands:
            raise ValueError(
                f"quorum must be no more than the number of islands, {islands}, got "
                f"{self.quorum.count}."
            )
        if self.quorum.count < islands and self.quorum.max_staleness != 0:
            return self
        options = vars(self).copy()
        del options["quorum"]
        return SyncSteps(**options)

    def way(self, inner: Way) -> Way:
        """Returns the way of asynchronous islands, which hold their state in the way `inner`."""
        return islands(self, inner, partial(join_server, self.quorum, self.outer))
