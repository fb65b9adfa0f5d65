"""Runs an optimizer's update on parts of arrays; the optimizer declares nothing for it.

The function that updates whole arrays is traced. Its elementwise equations run on parts, its sums
over elements become sums over replicas, and leaves that it needs whole have an owner.

Source: ZeRO (Rajbhandari et al., SC 2020), which trusts the user to choose an elementwise
optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import ShardLayout, is_shard, map_shards, whole_forms
from fddp.comm import Communicator, forms_of
from fddp.jaxpr import Follows, Kind, Ranks, Same, on_parts, spread
from fddp.optim import kinds_of_state, nodes_of
from fddp.sharding.owners import at_owners
from fddp.step.replica import Replica
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, report), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def run_on_parts(
    replica: Replica,
    update: Update,
    layouts: Sequence[ShardLayout],
    state: TrainState,
    local_state: TrainState,
    mean: Mean,
    comm: Communicator,
) -> tuple[TrainState, StepInfo]:
    """Runs an update of whole arrays on one replica's parts; shards of `state` stay shards.

    `local_state` is `state` with this replica's part in place of each trained parameter. The
    gradients in `mean` are parts, too.
    """
    if comm.size == 1:  # parts are whole leaves, and any optimizer works
        whole_state = map_shards(lambda x: x.parts.reshape(x.shape), state)
        trained = replica.trained(whole_state.params)
        grads = jax.tree.map(lambda x, leaf: x.reshape(leaf.shape), mean.grads, trained)
        new_state, info = update(whole_state, mean._replace(grads=grads))
    else:
        new_state, info = _run_on_parts(replica, comm, update, layouts, state, local_state, mean)

    def shard(old: Any, new: Any) -> Any:
        if not is_shard(old):
            return new
        if new.size == old.parts.size:
            return replace(old, parts=new.reshape(old.parts.shape))
        # A constant that the optimizer sets does not have the size of a part yet.
        return replace(old, parts=spread(new, old.parts.shape))

    sharded = jax.tree.map(
        shard,
        (state.params, state.opt_state),
        (new_state.params, new_state.opt_state),
        is_leaf=is_shard,
    )
    return new_state._replace(params=sharded[0], opt_state=sharded[1]), info


def _run_on_parts(
    replica: Replica,
    comm: Communicator,
    update: Update,
    layouts: Sequence[ShardLayout],
    state: TrainState,
    local_state: TrainState,
    mean: Mean,
) -> tuple[TrainState, StepInfo]:
    """Traces the update of whole arrays, and runs the program on parts."""
    state_form, mean_form = forms_of((whole_forms(state), mean._replace(grads=None)))
    params, treedef = jax.tree.flatten(state_form.params)
    param_kinds: list[Kind] = list(map(_same, params))
    grad_kinds: list[Kind | None] = [None] * len(params)
    for i in replica.chosen(state_form.params):
        param_kinds[i] = grad_kinds[i] = Follows(i)
    grad_kinds = treedef.unflatten(grad_kinds)
    opt_state_kinds = kinds_of_state(
        state_form.opt_state, replica.trained(state_form.params), grad_kinds
    )
    mean_kinds = jax.tree.map(_same, mean_form)._replace(grads=grad_kinds)
    state_kinds = jax.tree.map(_same, state_form._replace(params=None, opt_state=None))
    params_kinds = treedef.unflatten(param_kinds)
    state_kinds = state_kinds._replace(params=params_kinds, opt_state=opt_state_kinds)
    mean_form = mean_form._replace(grads=replica.trained(state_form.params))
    program, result_form = jax.make_jaxpr(update, return_shape=True)(state_form, mean_form)
    flat_kinds = nodes_of(Kind, (state_kinds, mean_kinds))

    def mask(leaf: int, size: int) -> Array:
        return layouts[leaf].of((size,)).mask(comm.replica_index())

    ranks = Ranks(mask, partial(_put_together, comm), partial(at_owners, comm, layouts))
    run = on_parts(program, flat_kinds, ranks)
    return jax.tree.unflatten(
        jax.tree.structure(result_form), run(*jax.tree.leaves((local_state, mean)))
    )


def _put_together(comm: Communicator, op: str, numbers: Sequence[Array]) -> list[Array]:
    """Reduces numbers over replicas, in order of rank, so that all replicas get the same bits."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    totals = list[Array](numbers)
    for dtype in dict.fromkeys(x.dtype for x in numbers):
        indices = [k for k, x in enumerate(numbers) if x.dtype == dtype]
        local = jnp.stack([numbers[k].reshape(()) for k in indices])
        if jnp.issubdtype(dtype, jnp.bool_):
            local = local.astype(jnp.uint8)
        reduced = reduce(comm.all_gather(local), axis=0).astype(dtype)
        for k, x in zip(indices, reduced):
            totals[k] = x.reshape(numbers[k].shape)
    return totals


def _same(x: Any) -> Same:
    return Same(x.size == 1)
