"""The parts of a state that replicas hold in shards, what one of them holds, and what cannot be held so.

Source: ZeRO (Rajbhandari et al., SC 2020).
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fddp.buckets import Shard, copy_of, is_shard, join, own_part, part_size, take_apart, whole_forms
from fddp.comm import Placement, device_parts, of_one_replica
from fddp.jaxpr import Follows, Kind
from fddp.optim import LocalState, LocalSteps, Optimizer, divided, kinds_of_state
from fddp.step.combinations import LOOKAHEAD, MEMORY, refuse
from fddp.step.replica import Replica, with_trained
from fddp.step.state import TrainState
from fddp.wording import leaf_name


def in_shards(replica: Replica, trained: Any, opt_state: Any, model_state: Any) -> tuple[Any, Any, Any]:
    """Cuts a state into what a step holds of it; inside a program, where each replica makes its own parts.

    Args:
      replica: what one replica does.
      trained: the parameters that are trained, None in place of others.
      opt_state: the optimizer's state for them.
      model_state: the buffers.

    Returns:
      The parameters, None for those that stay as they are; the optimizer's state; the buffers.
    """
    group = replica.group
    part = lambda x: own_part(x, group.size, group.communicator.replica_index())  # noqa: E731
    return _held(replica, trained, opt_state, model_state, part, partial(copy_of, group.shard_ranks))


def forms_in_shards(replica: Replica, trained: Any, opt_state: Any, model_state: Any) -> tuple[Any, Any, Any]:
    """The form of what `in_shards` makes, as all replicas together have it."""
    group = replica.group
    held = replica.group.placement.replicas_in_array

    def form(size: int, x: Any) -> Any:
        return jax.ShapeDtypeStruct((size * held,), jnp.result_type(x))

    def copy(x: Any) -> Shard:
        return Shard(form(x.size, x), x.shape, copies=True, ranks=group.shard_ranks)

    part = lambda x: form(part_size(x.size, group.size), x)  # noqa: E731
    return _held(replica, trained, opt_state, model_state, part, copy)


def held_form(placement: Placement, state: TrainState) -> TrainState:
    """The form of what one replica holds of a state.

    Args:
      placement: where the replicas are.
      state: its arrays, or their forms.

    Returns:
      A state of `jax.ShapeDtypeStruct`s, in shards where the state is. Where a replica is several devices these are the
      parts of each of them, but for what is pending.
    """
    equal, shards = take_apart(state._replace(hook_state=(), accumulated=None))
    own = shards, state.hook_state, state.accumulated
    shards, hook_state, accumulated = of_one_replica(own, placement.replicas_in_array)
    return join(device_parts(placement, equal), shards)._replace(hook_state=hook_state, accumulated=accumulated)


def nothing_shared(replica: Replica, held: TrainState) -> str:
    """Says why a step that was asked to share its state saves nothing by that.

    Args:
      replica: what one replica does.
      held: the form of what it holds.

    Returns:
      A line; "" where it holds less than all of the state, or was not asked to.
    """
    leaves = jax.tree.leaves((held.params, held.opt_state), is_leaf=is_shard)
    shards = [x for x in leaves if is_shard(x)]
    asked = replica.options.shard
    if not asked or any(x.parts.size < prod(x.shape) for x in shards):
        return ""
    if replica.group.size == 1:
        why = "there is one replica, which holds all of the state"
    elif shards:
        why = "no leaf has more than one element"
    else:
        why = "this optimizer's state has nothing of the parameters' shapes; shard='state' shares the parameters, too"
    return f"shard={asked!r} saves nothing: {why}."


def check_shards(replica: Replica, optimizer: Optimizer, params: Any) -> None:
    """Says what of a state cannot be held apart by the replicas.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      params: the parameters that it trains, or their forms.

    Raises:
      ValueError: an update mixes leaves, or a hook has a memory, or there are two sets of parameters.
    """
    remembers = jax.tree.leaves(replica.memory_form(params))
    others = {
        MEMORY: f"{replica.options.hook}, which remembers things from step to step" if remembers else "",
        LOOKAHEAD: LOOKAHEAD if isinstance(params, optax.LookaheadParams) else "",
    }
    refuse(replica.asked | {name: shown for name, shown in others.items() if shown})
    asked = f"shard={replica.options.shard!r}"
    if not replica.options.shard or isinstance(optimizer, LocalSteps):
        return
    trained = replica.trained(params)
    if sum(x.size for x in jax.tree.leaves(trained)) <= 1:
        raise ValueError(f"{asked} has nothing to share: no more than one number is trained; leave it out.")
    refused = divided(optimizer, trained).refused
    if refused and replica.group.size > 1:  # one replica has all of each leaf
        named = jax.tree_util.tree_leaves_with_path(trained)
        names = [leaf_name(path) for path, _ in named]
        told = [f"{names[leaf]} ({why})" for leaf, why in sorted(refused.items())]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(
            f"{asked} gives each replica a part of every leaf, and this optimizer's update does not go so: "
            f"{', '.join(told[:3])}{more}. Leave shard out, or take an optimizer that works on one leaf at a time; "
            "norms over all leaves are fine."
        )


def check_state(replica: Replica, state: TrainState) -> None:
    """Says that a state is not held as the step holds it.

    Args:
      replica: what one replica does.
      state: what a step was given.

    Raises:
      ValueError: it is whole and ought to be in shards, or the other way round, or in shards of other replicas.
    """
    if bool(replica.local_steps) != isinstance(state.opt_state, LocalState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made "
            f"{'with' if replica.local_steps else 'without'} fddp.local_steps: begin with "
            "step.init(fddp.whole(state.params))."
        )
    asked = replica.options.shard
    held = (state.params, state.opt_state, state.model_state)
    got = [_kind(x) for x in jax.tree.leaves(held, is_leaf=is_shard)]
    if not replica.apart:
        if any(shard for shard, *_ in got):
            raise ValueError(
                "the state is in shards, and this step was made without shard=: give it 'optimizer' or 'state', or "
                "give the step fddp.whole(state)."
            )
        return
    params, opt_state, model_state = whole_forms(held)
    shared, opt_state, model_state = forms_in_shards(replica, replica.trained(params), opt_state, model_state)
    expected = (with_trained(params, shared), opt_state, model_state)
    if got != [_kind(x) for x in jax.tree.leaves(expected, is_leaf=is_shard)]:
        made = f"shard={asked!r}" if asked else "fddp.local_steps"
        raise ValueError(
            f"the state is not in shards of {replica.group.size} replicas, as a step with {made} has it: go on with "
            "what step.init or the last step returned, or from a checkpoint; fddp.whole(state) is for looking at it."
        )


def _kind(x: Any) -> tuple[Any, ...]:
    return (True, x.copies, jnp.shape(x.parts)) if is_shard(x) else (False, False, jnp.shape(x))


def _held(
    replica: Replica,
    trained: Any,
    opt_state: Any,
    model_state: Any,
    part: Callable[[Any], Any],
    copy: Callable[[Any], Shard],
) -> tuple[Any, Any, Any]:
    def cut(x: Any) -> Shard:
        return Shard(part(x), jnp.shape(x), ranks=replica.group.shard_ranks)

    if replica.local_steps:
        inner, weight = jax.tree.map(copy, (opt_state.inner, opt_state.weight))
        held = opt_state._replace(inner=inner, weight=weight)
        return jax.tree.map(copy, trained), held, jax.tree.map(copy, model_state)
    params = jax.tree.map(lambda x: cut(x) if replica.options.shard == "state" else None, trained)
    if not replica.options.shard:
        return params, opt_state, model_state
    kinds = kinds_of_state(opt_state, trained)
    cut_state = jax.tree.map(
        lambda kind, x: cut(x) if isinstance(kind, Follows) else x,
        kinds,
        opt_state,
        is_leaf=lambda x: isinstance(x, Kind),
    )
    return params, cut_state, model_state
