"""The way of a sharded state: each replica holds a part, and updates that need more are refused.

Source: ZeRO (Rajbhandari et al., SC 2020).
"""

from functools import partial
from math import prod

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.buckets import is_shard
from fddp.comm import REPLICATED, Group
from fddp.jaxpr import Follows, Kind
from fddp.optim import divided, kinds_of_state
from fddp.schedules import Pieces
from fddp.sharding.gathered_twice import gathered_twice
from fddp.sharding.scattered import gathered_first, gathered_last
from fddp.sharding.whole import whole
from fddp.step import (
    WHOLE,
    Copy,
    Cut,
    Facts,
    Held,
    Replica,
    Shared,
    TrainState,
    Way,
    first_form,
    held_form,
)
from fddp.wording import leaf_name


def sharded(shared: Shared) -> Way:
    """Makes the way of a sharded optimizer's state, or of a wholly sharded state."""
    return WHOLE._replace(
        name=f"shard={shared!r}",
        check=partial(_check, shared),
        hold=partial(_hold, shared),
        gathered=_gathered,
        pieces=partial(_pieces, shared),
        apart=True,
        scattered=True,
        gathers=shared == "state",
        sums=False,
        table_rows=False,
    )


def _check(
    shared: Shared, replica: Replica, optimizer: optax.GradientTransformation, params: PyTree
) -> str:
    """Refuses an update that mixes leaves; returns a remark if sharding saves no memory."""
    trained = replica.trained(params)
    if sum(map(np.size, jax.tree.leaves(trained))) <= 1:
        raise ValueError(
            f"shard={shared!r} has nothing to share: no more than one number is trained; "
            "leave it out."
        )
    refused = divided(optimizer, trained).refused
    if refused and replica.group.parts > 1:  # one replica has all of each leaf
        leaves = jax.tree_util.tree_leaves_with_path(trained)
        names = [leaf_name(path) for path, _ in leaves]
        reasons = [f"{names[leaf]} ({why})" for leaf, why in sorted(refused.items())]
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ValueError(
            f"shard={shared!r} gives each replica a part of every leaf, and this optimizer's "
            f"update cannot be divided so: {', '.join(reasons[:3])}{more}. Leave shard out, or "
            "take an optimizer that works on one leaf at a time; norms over all leaves are fine."
        )
    return _nothing_saved(shared, replica, first_form(replica, optimizer, params, None, None))


def _nothing_saved(shared: Shared, replica: Replica, state: TrainState) -> str:
    """Explains why each replica holds all of the state; "" if it holds less."""
    form = held_form(replica.group.placement, state)
    leaves = jax.tree.leaves((form.params, form.opt_state), is_leaf=is_shard)
    shards = [x for x in leaves if is_shard(x)]
    if any(x.parts.size < prod(x.shape) for x in shards):
        return ""
    if replica.group.size == 1:
        why = "there is one replica, which holds all of the state"
    elif replica.group.parts == 1:
        why = "each node of the group has one replica, which holds all of the state"
    elif shards:
        why = "no leaf has more than one element"
    else:
        why = (
            "this optimizer's state has nothing of the parameters' shapes; shard='state' shares "
            "the parameters, too"
        )
    return f"shard={shared!r} saves nothing: {why}."


def _hold(
    shared: Shared,
    replica: Replica,
    trained: PyTree,
    opt_state: PyTree,
    model_state: PyTree,
    cut: Cut,
    copy: Copy,
) -> Held:
    """Cuts the optimizer's state and, under shard="state", the parameters."""
    kinds = kinds_of_state(opt_state, trained)
    cut_state = jax.tree.map(
        lambda kind, x: cut(x, kind.leaf) if isinstance(kind, Follows) else x,
        kinds,
        opt_state,
        is_leaf=lambda x: isinstance(x, Kind),
    )
    leaves, treedef = jax.tree.flatten(trained)
    params = [cut(x, leaf) if shared == "state" else None for leaf, x in enumerate(leaves)]
    return treedef.unflatten(params), cut_state, None


def _gathered(group: Group, state: TrainState, replicated: TrainState) -> TrainState:
    params = whole(state.params, group=group)
    return replicated._replace(params=group.placement.place(params, REPLICATED))


def _pieces(shared: Shared, replica: Replica, facts: Facts) -> Pieces:
    reshard = replica.options.reshard_after_forward
    make = gathered_last if shared == "optimizer" else gathered_twice if reshard else gathered_first
    return make(replica, facts)
