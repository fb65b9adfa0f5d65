"""The strategy of a sharded state: each replica holds a part. Updates that need more are refused.

Source: ZeRO (Rajbhandari et al., SC 2020).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import shards_of
from fddp.comm import REPLICATED, Group
from fddp.jaxpr import Follows, Kind
from fddp.optim import divided, kinds_of_state
from fddp.sharding.scattered import gathered_first, gathered_last
from fddp.sharding.whole import whole
from fddp.step import (
    Agreed,
    Replica,
    Shared,
    Strategy,
    TrainState,
    Trees,
    first_form,
    leaf_layouts,
    local_form,
)
from fddp.step.schedules import Pieces
from fddp.wording import leaf_name


@dataclass(frozen=True, kw_only=True)
class Sharded(Strategy):
    """Each replica holds and updates a part of each leaf of the state."""

    shared: Shared
    in_shards: bool = True
    scatters_grads: bool = True
    # Parts are scattered: no message is a sum of whole messages.
    exact: bool = False
    table_rows: bool = False

    def check(self, replica: Replica, optimizer: Any, params: PyTree) -> str:
        """Refuses an update that mixes leaves; returns a remark if sharding saves no memory."""
        trained = replica.trained(params)
        if sum(map(np.size, jax.tree.leaves(trained))) <= 1:
            raise ValueError(
                f"{self.name} has nothing to share: no more than one number is trained; "
                "leave it out."
            )
        refused = divided(optimizer, trained).refused
        if refused and replica.group.size > 1:  # one replica has all of each leaf
            leaves = jax.tree_util.tree_leaves_with_path(trained)
            names = [leaf_name(path) for path, _ in leaves]
            reasons = [f"{names[leaf]} ({why})" for leaf, why in sorted(refused.items())]
            more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            whole = ""
            if any(map(np.iscomplexobj, jax.tree.leaves(trained))):
                whole = "; optax.adam takes complex leaves without split_real_and_imaginary"
            raise ValueError(
                f"{self.name} gives each replica a part of every leaf, and this optimizer's "
                f"update cannot be divided so: {', '.join(reasons[:3])}{more}. Leave shard out, "
                "or take an optimizer that works on one leaf at a time; norms over all leaves are "
                f"fine{whole}."
            )
        form = first_form(replica, optimizer, params, None, None)
        why = _nothing_saved(replica, form)
        return f"{self.name} saves nothing: {why}." if why else ""

    def layouts(self, replica: Replica, whole: Trees) -> Trees:
        """Cuts the optimizer's state and, under shard="state", the parameters."""
        trained, opt_state, _ = whole
        params = leaf_layouts(replica.group, trained)
        leaves = jax.tree.leaves(params)
        cut_state = jax.tree.map(
            lambda kind, x: leaves[kind.leaf].of(x.shape) if isinstance(kind, Follows) else None,
            kinds_of_state(opt_state, trained),
            opt_state,
            is_leaf=lambda x: isinstance(x, Kind),
        )
        whole_params, _, buffers = super().layouts(replica, whole)
        return whole_params if self.shared == "optimizer" else params, cut_state, buffers

    def with_whole_params(
        self, group: Group, state: TrainState, replicated: TrainState
    ) -> TrainState:
        """Gathers the parameters."""
        params = whole(state.params, group=group)
        return replicated._replace(params=group.placement.place(params, REPLICATED))

    def pieces(self, replica: Replica, agreed: Agreed) -> Pieces:
        """Makes the pieces of a step that scatters gradients and gathers parameters."""
        if self.shared == "optimizer":
            return gathered_last(replica, agreed)
        return gathered_first(replica, agreed)


def _nothing_saved(replica: Replica, state: TrainState) -> str:
    """Explains why each replica holds all of the state; "" if it holds less."""
    form = local_form(replica.group.placement, state)
    shards = shards_of((form.params, form.opt_state))
    if any(x.parts.size < prod(x.shape) for x in shards):
        return ""
    if replica.group.size == 1:
        return "there is one replica, which holds all of the state"
    if shards:
        return "no leaf has more than one element"
    return (
        "this optimizer's state has nothing of the parameters' shapes; shard='state' shares the "
        "parameters, too"
    )
