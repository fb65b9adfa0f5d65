"""Replicas start equal: filled with rank 0's values, or made by one function on all of them.

Source: `_sync_module_states` in PyTorch's `distributed.py`.
"""

import platform
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fddp.buckets import join
from fddp.comm import REPLICATED, Group, described, laid_out, shortened, specs
from fddp.jax_internals import ClosedJaxpr, without_context_mesh
from fddp.jaxpr import merge, split
from fddp.losses import not_numeric
from fddp.optim import DynamicScaleState, Optimizer, check_needs
from fddp.step.checks import check_arrays, check_trained
from fddp.step.combinations import FUNCTION, LOOKAHEAD, MEMORY, MULTI_STEPS, SCALE_INSIDE, refuse
from fddp.step.held import first_held, form_in_shards, with_held
from fddp.step.made import described_program, is_form, made_state, read_functions
from fddp.step.replica import Replica
from fddp.step.state import TrainState, check_no_state


class Start(NamedTuple):
    """The values that a step begins with, as one rank was given them."""

    params: Any
    """Arrays; or forms of those that a function makes."""
    model_state: Any
    """Likewise."""
    rng: Any
    program: ClosedJaxpr | None
    """Makes the arrays in place of which there are forms; None: all are there."""
    remark: str
    """A word for the user, or ""."""


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


@without_context_mesh
def read_start(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any, rng: Any) -> Start:
    """Reads what a step is to begin with, on one rank; nothing is computed.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      params: a tree of arrays, or a function that makes one.
      model_state: likewise, or None.
      rng: a tree of random keys, or None.

    Returns:
      The start.

    Raises:
      ValueError: a step cannot begin with it.
      TypeError: something is no array, or a function cannot be traced.
    """
    params, model_state, program = read_functions(params, model_state)
    for name, tree in (("model_state", model_state), ("rng", rng)):
        check_no_state(name, tree)
        if found := not_numeric(tree):
            raise TypeError(f"{name} must be a tree of arrays, and holds {shortened(found, ', ')}.")
    remark = _check_start(replica, optimizer, params, program is not None)
    return Start(params, model_state, rng, program, remark)


@without_context_mesh
def first_state(replica: Replica, optimizer: Optimizer, start: Start) -> TrainState:
    """The state that a step begins with, on the group's devices; every rank calls it.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      start: of one form on all ranks.

    Returns:
      The state; each replica has made its own parts of it.
    """
    group = replica.group
    placement = group.placement
    leaves, tree = jax.tree.flatten((start.params, start.model_state))
    given = [i for i, x in enumerate(leaves) if not is_form(x)]
    there, to_make = split(given, leaves)
    there, rng = equal_start(group, (there, start.rng))
    params, model_state = tree.unflatten(merge(given, there, to_make))
    hook_state = placement.program(partial(replica.remembered, params), (), placement.per_replica)()
    number = placement.place(np.zeros((), np.int32), REPLICATED)
    state = TrainState(number, params, None, model_state, hook_state, None, rng)
    if start.program is not None:
        return made_state(replica, optimizer, start.program, state)
    make = partial(first_held, replica, optimizer, specs(placement, replica.trained(params)))
    program = placement.program(make, (REPLICATED, REPLICATED), (REPLICATED, placement.per_replica))
    return with_held(state, join(*program(params, model_state)))


@without_context_mesh
def first_form(replica: Replica, optimizer: Optimizer, params: Any, model_state: Any, rng: Any) -> TrainState:
    """The form of what `first_state` makes, of arrays, their forms, or functions; nothing is computed."""

    def first(params: Any, model_state: Any, rng: Any) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, None, model_state, (), None, rng)

    params, model_state, _ = read_functions(params, model_state)
    where = specs(replica.group.placement, replica.trained(params))
    state = jax.eval_shape(first, params, model_state, rng)
    opt_state = jax.eval_shape(optimizer.init, replica.trained(state.params))
    return form_in_shards(replica, state._replace(opt_state=opt_state, hook_state=replica.memory_form(params)), where)


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


def _check_start(replica: Replica, optimizer: Optimizer, params: Any, made: bool) -> str:
    """Refuses what a step cannot begin with; returns a remark for the user, or ""."""
    check_arrays(params)
    check_trained(params, replica.chosen(params))
    check_needs(optimizer, replica.trained(params))
    remembers = jax.tree.leaves(replica.memory_form(params))
    others = {
        MEMORY: f"{replica.options.hook}, which remembers things from step to step" if remembers else "",
        FUNCTION: FUNCTION if made else "",
        LOOKAHEAD: LOOKAHEAD if isinstance(params, optax.LookaheadParams) else "",
        **_of_several_steps(replica, optimizer, params),
    }
    refuse(replica.asked | {name: shown for name, shown in others.items() if shown})
    return replica.way.check(replica, optimizer, params)


def _of_several_steps(replica: Replica, optimizer: Optimizer, params: Any) -> dict[str, str]:
    """The features of an optimizer that makes one update of several steps."""
    state = jax.eval_shape(lambda params: optimizer.init(replica.trained(params)), params)

    def inside(tree: Any, kind: type) -> list[Any]:
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
        return [x for x in nodes if isinstance(x, kind)]

    several = inside(state, optax.MultiStepsState)
    scaled = inside(several, DynamicScaleState)
    return {MULTI_STEPS: MULTI_STEPS if several else "", SCALE_INSIDE: SCALE_INSIDE if scaled else ""}


@without_context_mesh
def described_start(replica: Replica, optimizer: Optimizer, start: Start) -> Iterable[str]:
    """Describes, line by line, all that must be equal on all ranks before anything is sent."""
    params = start.params
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
        *described("model_state", start.model_state),
        *described("rng", start.rng),
        *([] if start.program is None else described_program(start.program)),
    ]
