"""Replicas start equal: filled with rank 0's values.

Source: `_sync_module_states` in PyTorch's `distributed.py`.
"""

import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fddp.buckets import join, take_apart
from fddp.comm import REPLICATED, Group, described, laid_out, specs
from fddp.jaxpr import merge, split
from fddp.optim import Optimizer, check_needs, optimizer_laid_out
from fddp.step.checks import check_arrays, check_trained
from fddp.step.combinations import LOOKAHEAD, MEMORY, refuse
from fddp.step.held import form_in_shards, in_shards, with_held
from fddp.step.replica import Replica
from fddp.step.state import TrainState
from fddp.step.way import Held


def equal_start(group: Group, tree: Any) -> Any:
    """Gives every replica rank 0's values, in arrays of their own.

    Args:
      group: the replicas.
      tree: arrays; of the same form on every rank.

    Returns:
      The tree, on the group's devices; later donation leaves the caller's arrays alone. What the caller has placed in
      parts along other axes of the mesh stays so.
    """
    leaves, treedef = jax.tree.flatten(tree)
    apart = [i for i, x in enumerate(leaves) if group.placement.spec(x) != REPLICATED]
    parted, whole = split(apart, leaves)
    whole = group.placement.place(group.broadcast(whole), REPLICATED)
    return treedef.unflatten(merge(apart, _from_first_replica(group, parted) if parted else [], whole))


def first_state(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any, rng: Any) -> TrainState:
    """The state that a step begins with, on the group's devices.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      params: whole, equal on all replicas.
      model_state: likewise.
      rng: likewise.

    Returns:
      The state; each replica has made its own parts of it.
    """
    placement = replica.group.placement
    hook_state = placement.program(replica.remembered, (REPLICATED,), placement.per_replica)(params)
    number = placement.place(np.zeros((), np.int32), REPLICATED)
    state = TrainState(number, params, None, model_state, hook_state, None, rng)
    return with_held(state, _first_held(replica, optimizer, params, model_state))


def first_form(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any, rng: Any) -> TrainState:
    """The form of what `first_state` makes, of arrays or their forms; nothing is computed."""

    def first(params: Any, model_state: Any, rng: Any) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, None, model_state, (), None, rng)

    state = jax.eval_shape(first, params, model_state, rng)
    opt_state = jax.eval_shape(optimizer.init, replica.trained(state.params))
    return form_in_shards(replica, state._replace(opt_state=opt_state, hook_state=replica.memory_form(params)))


def _first_held(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any) -> Held:
    """The first parameters, optimizer's state and buffers, as replicas hold them."""
    placement = replica.group.placement
    trained = replica.trained(params)
    where = specs(placement, trained)

    def make(trained: Any, model_state: Any) -> Any:
        # Copied: an optimizer may keep the parameters themselves, and memory can be donated only once.
        opt_state = jax.tree.map(jnp.copy, optimizer.init(trained))
        held, opt_state, buffers = in_shards(replica, trained, opt_state, model_state)
        return take_apart((held, optimizer_laid_out(placement.other_axes, opt_state, trained, where), buffers))

    made = placement.program(make, (REPLICATED, REPLICATED), (REPLICATED, placement.per_replica))(trained, model_state)
    return join(*made)


def _from_first_replica(group: Group, tree: Any) -> Any:
    """Gives every replica the first one's values of arrays that lie in parts, bit for bit, where they lie."""

    def broadcast(x: jax.Array) -> jax.Array:
        # Bytes to which only the first replica contributes: exact for any dtype.
        words = x.view(jnp.uint8)
        mine = jnp.where(group.communicator.replica_index() == 0, words, jnp.zeros_like(words))
        return group.communicator.all_reduce(mine).view(x.dtype)

    where = specs(group.placement, tree)
    program = group.placement.program(
        lambda tree: laid_out(group.placement, jax.tree.map(broadcast, tree), where), (REPLICATED,), REPLICATED
    )
    return program(group.placement.place(tree, REPLICATED))


def check_start(replica: Replica, optimizer: Optimizer, params: Any) -> str:
    """Refuses what a step cannot begin with; returns a remark for the user, or ""."""
    check_arrays(params)
    check_trained(params, replica.chosen(params))
    check_needs(optimizer, replica.trained(params))
    remembers = jax.tree.leaves(replica.memory_form(params))
    others = {
        MEMORY: f"{replica.options.hook}, which remembers things from step to step" if remembers else "",
        LOOKAHEAD: LOOKAHEAD if isinstance(params, optax.LookaheadParams) else "",
    }
    refuse(replica.asked | {name: shown for name, shown in others.items() if shown})
    return replica.way.check(replica, optimizer, params)


def described_start(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any, rng: Any) -> Iterable[str]:
    """Describes, line by line, all that must be equal on all ranks before anything is sent."""
    opt_state = jax.eval_shape(lambda params: optimizer.init(replica.trained(params)), params)
    return [
        f"fddp {version('fddp')}, jax {jax.__version__}, Python {platform.python_version()}",
        repr(replica.options),
        replica.way.described,
        f"plan {replica.provisional_plan(params).digest}",
        *replica.described_groups(params),
        f"group.local {replica.group.local}",
        f"{len(jax.tree.leaves(params))} parameters",
        *described("parameter", params),
        *described("parts of", specs(replica.group.placement, params)),
        *described("optimizer", opt_state),
        *described("model_state", model_state),
        *described("rng", rng),
    ]
