"""What of a state its replicas hold in shards, and what cannot be held so.

Source: ZeRO (Rajbhandari et al., SC 2020).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fddp.buckets import Shard, is_shard, own_part, part_size, whole_forms
from fddp.comm import Group
from fddp.jaxpr import Follows, Kind
from fddp.optim import LocalState, LocalSteps, Optimizer, divided, kinds_of_state
from fddp.step.replica import Replica, with_trained
from fddp.step.state import TrainState


def in_shards(replica: Replica, trained: Any, opt_state: Any) -> tuple[Any, Any]:
    """What a step holds of a state, of which each replica makes its own parts; inside a program.

    Args:
      replica: what one replica does.
      trained: the parameters that are trained, None in place of others.
      opt_state: the optimizer's state for them.

    Returns:
      The parameters, None for those that stay as they are; the optimizer's state.
    """
    group = replica.group
    if replica.local_steps:
        return jax.tree.map(lambda x: None, trained), _stacked(group, opt_state, lambda x: x.reshape(-1))
    return _held(replica, trained, opt_state, lambda x: own_part(x, group.size, group.communicator.replica_index()))


def forms_in_shards(replica: Replica, trained: Any, opt_state: Any) -> tuple[Any, Any]:
    """The form of what `in_shards` makes, as all replicas together have it."""
    group = replica.group

    def part(x: Any) -> Any:
        size = part_size(x.size, group.size) * group.placement.replicas_in_array
        return jax.ShapeDtypeStruct((size,), jnp.result_type(x))

    if replica.local_steps:
        held = group.placement.replicas_in_array
        forms = _stacked(group, opt_state, lambda x: jax.ShapeDtypeStruct((x.size * held,), x.dtype))
        return jax.tree.map(lambda x: None, trained), forms
    return _held(replica, trained, opt_state, part)


def check_shards(replica: Replica, optimizer: Optimizer, params: Any) -> None:
    """Says what of an optimizer's state cannot be held in parts.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      params: the parameters that it trains, or their forms.

    Raises:
      ValueError: its update needs whole leaves.
    """
    if replica.local_steps and jax.tree.leaves(replica.memory_form(params)):
        raise ValueError(
            f"{replica.options.hook} remembers things from step to step, and with fddp.local_steps not every step "
            "sends: take a hook without a memory."
        )
    asked = f"shard={replica.options.shard!r}"
    if not replica.options.shard or isinstance(optimizer, LocalSteps):
        return
    if isinstance(params, optax.LookaheadParams):
        raise ValueError(f"{asked} does not know optax.lookahead, which has two sets of parameters.")
    trained = replica.trained(params)
    if sum(x.size for x in jax.tree.leaves(trained)) <= 1:
        raise ValueError(f"{asked} has nothing to share: no more than one number is trained; leave it out.")
    whole = divided(optimizer, trained).whole
    if whole:
        named = jax.tree_util.tree_leaves_with_path(trained)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
        told = [f"{names[leaf]} ({why})" for leaf, why in sorted(whole.items())]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(
            f"{asked} gives each replica a part of every leaf, and this optimizer's update needs whole: "
            f"{', '.join(told[:3])}{more}. Leave shard out, or take an optimizer that works element by element; norms "
            "over all of a leaf or of all leaves are fine."
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
            f"{'with' if replica.local_steps else 'without'} fddp.local_steps: begin with step.init(state.params)."
        )
    asked, held = replica.options.shard, (state.params, state.opt_state)
    got = [(is_shard(x), jnp.shape(x.parts if is_shard(x) else x)) for x in jax.tree.leaves(held, is_leaf=is_shard)]
    if replica.local_steps:
        own = replica.group.placement.replicas_in_array
        whole = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_shard) if is_shard(x)]
        if any(x.shape[0] != replica.group.size or x.parts.shape != (prod(x.shape[1:]) * own,) for x in whole):
            raise ValueError(
                f"the state is of {whole[0].shape[0]} replicas that train alone, and this group has "
                f"{replica.group.size}: begin with step.init(state.params)."
            )
        return
    if not asked:
        if any(shard for shard, _ in got):
            raise ValueError(
                "the state is in shards, and this step was made without shard=: give it 'optimizer' or 'state', or "
                "give the step fddp.whole(state)."
            )
        return
    params, opt_state = whole_forms(held)
    shared, opt_state = forms_in_shards(replica, replica.trained(params), opt_state)
    expected = jax.tree.leaves((with_trained(params, shared), opt_state), is_leaf=is_shard)
    if got != [(is_shard(x), jnp.shape(x.parts if is_shard(x) else x)) for x in expected]:
        raise ValueError(
            f"the state is not in shards of {replica.group.size} replicas, as a step with shard={asked!r} has it: go "
            "on with what step.init or the last step returned, or from a checkpoint; fddp.whole(state) is for looking "
            "at it."
        )


def _stacked(group: Group, opt_state: LocalState, own: Callable[[Any], Any]) -> LocalState:
    """What each replica has for itself, as shards of all of it along a first dim."""
    apart = opt_state._replace(outer=None)
    return jax.tree.map(lambda x: Shard(own(x), (group.size, *x.shape)), apart)._replace(outer=opt_state.outer)


def _held(replica: Replica, trained: Any, opt_state: Any, part: Callable[[Any], Any]) -> tuple[Any, Any]:
    shard = replica.options.shard

    def cut(x: Any) -> Shard:
        return Shard(part(x), jnp.shape(x))

    params = jax.tree.map(lambda x: cut(x) if shard == "state" else None, trained)
    if not shard:
        return params, opt_state
    kinds = kinds_of_state(opt_state, trained)
    cut_state = jax.tree.map(
        lambda kind, x: cut(x) if isinstance(kind, Follows) else x,
        kinds,
        opt_state,
        is_leaf=lambda x: isinstance(x, Kind),
    )
    return params, cut_state
