"""The state as replicas hold it: in parts or whole, as the strategy's `layouts` say.

One tree of layouts decides how a first state is cut, and how a user's state is checked.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from fddp.buckets import (
    Shard,
    ShardLayout,
    insert_shards,
    is_shard,
    leaf_layout,
    leaves_with_shards,
    shards_of,
    split_shards,
    whole_forms,
    with_shards,
)
from fddp.comm import (
    REPLICATED,
    Group,
    Placement,
    add_replica_dim,
    described,
    device_parts,
    of_one_replica,
    shortened,
)
from fddp.step.checks import check_no_sync
from fddp.step.replica import Replica
from fddp.step.state import TrainState

# (layout, whole array) → parts
Part: TypeAlias = Callable[[ShardLayout, Any], Any]


def laid_out_state(replica: Replica, state: TrainState, part: Part) -> TrainState:
    """Replaces the arrays of a state that replicas hold in parts by shards."""
    trees = replica.trained(state.params), state.opt_state, state.model_state
    layouts = replica.strategy.layouts(replica, trees)
    whole = state.params, state.opt_state, state.model_state
    params, opt_state, model_state = with_shards(layouts, whole, part)
    return state._replace(params=params, opt_state=opt_state, model_state=model_state)


def form_in_shards(replica: Replica, state: TrainState) -> TrainState:
    """Returns shapes and dtypes of a step's state, with the shards of all replicas in one array."""
    count = replica.group.placement.replicas_in_array

    def form(layout: ShardLayout, x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows, *dims = layout.dims
        return jax.ShapeDtypeStruct((count * rows, *dims), jnp.result_type(x))

    return laid_out_state(replica, state, form)


def local_form(placement: Placement, state: TrainState) -> TrainState:
    """Returns shapes and dtypes of one replica's share of a state.

    If a replica has several devices, these are the parts of one device, except for pending sums and
    hook state.
    """
    replicated, shards = split_shards(state._replace(hook_state=(), accumulated=None))
    local = shards, state.hook_state, state.accumulated
    shards, hook_state, accumulated = of_one_replica(local, placement.replicas_in_array)
    return insert_shards(device_parts(placement, replicated), shards)._replace(
        hook_state=hook_state, accumulated=accumulated
    )


def check_layout(replica: Replica, state: TrainState) -> TrainState:
    """Raises ValueError unless a state fits the step: its shards, replicas, optimizer and hook.

    Returns the state that gradients are computed for, with shapes of whole arrays in place of
    shards.
    """
    gradient_state = whole_forms(state)
    _check_optimizer(replica, gradient_state)
    kinds = _kinds(state)
    if not replica.strategy.in_shards and any(shard for shard, *_ in kinds):
        raise ValueError(
            "the state is in shards, and this step has no shard=: give it 'optimizer' or "
            "'state', or give the step fddp.whole(state)."
        )
    if replica.strategy.in_shards and kinds != _kinds(form_in_shards(replica, gradient_state)):
        raise ValueError(
            f"the state is not in shards of {replica.group.size} replicas, as a step with "
            f"{replica.strategy.name} has it: continue with the state that step.init or the last "
            "step returned, or from a checkpoint; fddp.whole(state) is only for reading it, or for "
            "another place: model_state=fddp.whole(state.params)."
        )
    _check_group(replica.group, state)
    _check_pending(replica, state)
    _check_memory(replica, gradient_state)
    return gradient_state


def _check_optimizer(replica: Replica, state: TrainState) -> None:
    """Raises ValueError if `opt_state` belongs to another optimizer or other trained leaves."""
    if replica.init is None:
        return
    expected = jax.eval_shape(replica.init, replica.trained(state.params))
    trees = state.opt_state, expected
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in trees]
    nodes = [jax.tree.structure(tree) for tree in trees]
    if shapes[0] == shapes[1] and nodes[0] == nodes[1]:
        return
    has, needs = (described("", tree) for tree in trees)
    more = shortened([x for x in has if x not in needs])
    less = shortened([x for x in needs if x not in has])
    if not (more or less):  # the arrays agree, their containers differ
        more, less = nodes
    raise ValueError(
        "the state belongs to another optimizer, or to other trained parameters (ignore=): its "
        f"opt_state has {more or 'nothing else'}, and this step's {less or 'nothing else'}. "
        "Make one with step.init(fddp.whole(state.params))."
    )


def leaf_layouts(group: Group, params: PyTree) -> Any:
    """Returns the tree of the layouts of parameters in parts of replicas."""

    def layout(x: Any) -> ShardLayout:
        return replace(leaf_layout(jnp.shape(x), group.size), ranks=ranks_of_parts(group))

    return jax.tree.map(layout, params)


def ranks_of_parts(group: Group) -> tuple[int, ...] | None:
    """Processes that hold the parts of a shard; None on a mesh, which arrays name."""
    return None if group.placement.on_mesh else group.global_ranks


def _check_group(group: Group, state: TrainState) -> None:
    """Raises ValueError if replicas outside this group hold the shards of a state."""
    probe = group.placement.place(np.zeros(()), REPLICATED)
    for x in shards_of(state):
        holders = _holders(x)
        members = _holders(Shard(probe, replace(x.layout, ranks=ranks_of_parts(group))))
        if holders in (members, None):
            continue
        raise ValueError(
            f"the state is in shards that {holders} hold, and the replicas of this step are "
            f"{members}: continue with a step of the group that holds it, or save it there and "
            "restore it here (fddp.Checkpoints)."
        )


def _holders(shard: Shard) -> str | None:
    """Formats the ranks or devices of a shard's parts; None for shapes, or arrays on the host."""
    if shard.layout.ranks is not None:
        return f"ranks {list(shard.layout.ranks)} of the job"
    mesh = getattr(getattr(shard.parts, "sharding", None), "mesh", None)
    return f"devices {[x.id for x in mesh.devices.flat]}" if isinstance(mesh, Mesh) else None


def _check_pending(replica: Replica, state: TrainState) -> None:
    """Raises ValueError if the pending sums have other replicas or `find_unused_parameters`."""
    if state.accumulated is not None:
        check_no_sync(replica)
    count = replica.group.placement.replicas_in_array
    for pending in jax.tree.leaves(state.accumulated)[:1]:
        if len(pending) != count:
            raise ValueError(
                f"the state has gradients pending of {len(pending)} replicas, this group has "
                f"{count}; synchronize with a step before the number of replicas changes."
            )
    option = replica.options.find_unused_parameters
    if state.accumulated and option == (state.accumulated.sums.used is None):
        raise ValueError(
            f"the state has gradients pending from a step with find_unused_parameters={not option},"
            f" this step has {option}; synchronize with a step before the option changes."
        )


def _check_memory(replica: Replica, state: TrainState) -> None:
    """Raises ValueError if the hook state comes from another hook or number of replicas."""
    share = replica.group.placement.replicas_in_array
    actual = described("", state.hook_state)
    expected = described("", hook_state_form(replica, state.params))
    if actual != expected:
        raise ValueError(
            f"the state's hook_state is not that of {replica.options.hook} on {share} replicas: it "
            f"has {'; '.join(actual) or 'nothing'} instead of {'; '.join(expected) or 'nothing'}. "
            "Use that of a new step.init(params), which resets the hook's memory, or the original "
            "hook and replicas."
        )


def _kinds(state: TrainState) -> list[tuple[Any, ...]]:
    """Lists whether each leaf is in a shard, and the shape of its array."""
    leaves = leaves_with_shards((state.params, state.opt_state, state.model_state))
    return [(is_shard(x), jnp.shape(x.parts if is_shard(x) else x)) for x in leaves]


def first_hook_state(replica: Replica, params: PyTree) -> Any:
    """Makes one replica's initial hook state for each trained leaf, or () without state."""
    if replica.options.hook is None:
        return ()
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), replica.trained(params))
    memory = jax.tree.map(replica.options.hook.init, forms)
    if not jax.tree.leaves(memory):
        return ()
    return add_replica_dim(memory)


def hook_state_form(replica: Replica, params: PyTree) -> Any:
    """Returns shapes and dtypes of the hook state of all replicas."""
    share = replica.group.placement.replicas_in_array
    forms = jax.eval_shape(partial(first_hook_state, replica), params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((share, *x.shape[1:]), x.dtype), forms)
