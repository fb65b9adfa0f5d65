"""The state as replicas hold it: sharded or replicated, as the way's `hold` decides.

`hold` runs on the arrays of a program for the first state, and on shapes and dtypes to check a
user's state.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from fddp.buckets import (
    Layout,
    Shard,
    device_cut,
    insert_shards,
    is_shard,
    leaf_layout,
    leaves_with_shards,
    map_shards,
    shards_of,
    take_apart,
    whole_forms,
)
from fddp.comm import (
    REPLICATED,
    Group,
    Placement,
    described,
    device_parts,
    of_one_replica,
    shortened,
    specs,
)
from fddp.jaxpr import with_trained
from fddp.optim import optimizer_laid_out
from fddp.step.checks import check_no_sync
from fddp.step.hook_state import hook_state_form
from fddp.step.replica import Replica
from fddp.step.state import TrainState
from fddp.step.step_optimizer import Optimizer
from fddp.step.way import Held


def first_held(
    replica: Replica, optimizer: Optimizer, leaf_specs: PyTree, params: PyTree, model_state: PyTree
) -> tuple[Any, Any]:
    """Makes a replica's share of the first state from whole parameters; inside a program.

    Returns (replicated tree, this replica's shards). `leaf_specs` is a tree of `PartitionSpec`s.
    """
    trained = replica.trained(params)
    # Copied because an optimizer state may contain the parameters, and an array is donated once.
    opt_state = jax.tree.map(jnp.copy, optimizer.init(trained))
    axes = replica.group.placement.other_axes
    opt_state = optimizer_laid_out(axes, opt_state, trained, leaf_specs)
    return take_apart(in_shards(replica, leaf_specs, (trained, opt_state, model_state)))


def in_shards(replica: Replica, leaf_specs: PyTree, whole: Held) -> Held:
    """Cuts a replica's share from whole arrays; inside a program."""
    group = replica.group
    comm = group.communicator.at("shards")
    layouts = leaf_layouts(group, whole[0], leaf_specs)

    def cut(x: jax.Array, leaf: int) -> Shard:
        layout = layouts[leaf].of(x.shape)
        return _shard(group, layout.part(x, comm.replica_index()), layout)

    return replica.way.hold(replica, whole, cut)


def form_in_shards(replica: Replica, state: TrainState, leaf_specs: PyTree) -> TrainState:
    """Returns shapes and dtypes of a step's state, with the shards of all replicas in one array.

    `state` has whole arrays, or their shapes and dtypes.
    """
    group = replica.group
    trained = replica.trained(state.params)
    layouts = leaf_layouts(group, trained, leaf_specs)
    count = group.placement.replicas_in_array

    def form(dims: tuple[int, ...], x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count * dims[0], *dims[1:]), jnp.result_type(x))

    def cut(x: jax.Array | jax.ShapeDtypeStruct, leaf: int) -> Shard:
        layout = layouts[leaf].of(x.shape)
        return _shard(group, form(layout.dims, x), layout)

    whole = trained, state.opt_state, state.model_state
    return with_held(state, replica.way.hold(replica, whole, cut))


def _shard(group: Group, parts: Any, layout: Layout) -> Shard:
    """Makes a shard for the replicas that share a state."""
    nodes = group.nodes if group.placement.on_mesh else None
    return Shard(parts, layout, ranks=group.shard_ranks, nodes=nodes)


def with_held(state: TrainState, share: Held) -> TrainState:
    """Replaces the parts of a state for which `share` is not None."""
    params, opt_state, model_state = share
    state = state._replace(params=with_trained(state.params, params), opt_state=opt_state)
    return state if model_state is None else state._replace(model_state=model_state)


def held_form(placement: Placement, state: TrainState) -> TrainState:
    """Returns shapes and dtypes of one replica's share of a state.

    If a replica has several devices, these are the parts of one device, except for pending sums and
    hook state.
    """
    replicated, shards = take_apart(state._replace(hook_state=(), accumulated=None))
    local = shards, state.hook_state, state.accumulated
    shards, hook_state, accumulated = of_one_replica(local, placement.replicas_in_array)
    share = insert_shards(device_parts(placement, replicated), shards)._replace(
        hook_state=hook_state, accumulated=accumulated
    )
    return map_shards(_of_device, share)


def check_held(replica: Replica, state: TrainState) -> TrainState:
    """Raises ValueError unless a state fits the step: its shards, replicas, optimizer and hook.

    Returns the state that gradients are computed for, with shapes of whole arrays in place of
    shards.
    """
    gradient_state = whole_forms(state)
    _check_optimizer(replica, gradient_state)
    kinds = _kinds(state)
    if not replica.way.apart and any(shard for shard, *_ in kinds):
        raise ValueError(
            "the state is in shards, and this step was made without shard=: give it 'optimizer' or "
            "'state', or give the step fddp.whole(state)."
        )
    if replica.way.apart and kinds != _kinds(_form_of_whole(replica, gradient_state)):
        raise ValueError(
            f"the state is not in shards of {replica.group.parts} replicas, as a step with "
            f"{replica.way.name} has it: continue with the state that step.init or the last step "
            "returned, or from a checkpoint; fddp.whole(state) is only for reading it, or for "
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


def _form_of_whole(replica: Replica, state: TrainState) -> TrainState:
    """Returns the expected shapes of a step's state, from shapes of whole arrays with shardings."""
    leaf_specs = specs(replica.group.placement, replica.trained(state.params))
    return form_in_shards(replica, state, leaf_specs)


def leaf_layouts(group: Group, params: PyTree, leaf_specs: PyTree) -> list[Layout]:
    """Returns the layout of each leaf in parts of replicas."""
    layouts = list[Layout]()
    for x, spec in zip(jax.tree.leaves(params), jax.tree.leaves(leaf_specs)):
        cut = device_cut(group.placement.view, spec, jnp.shape(x))
        layouts.append(leaf_layout(jnp.shape(x), group.parts, cut))
    return layouts


def _of_device(shard: Shard) -> Shard:
    """Returns one device's part of a replica's shard, as shape and dtype."""
    rows, *dims = shard.parts.shape
    local = jax.ShapeDtypeStruct((rows // shard.layout.cut.parts, *dims), shard.parts.dtype)
    return replace(shard, parts=local, layout=shard.layout.of_device())


def check_cuts(state: TrainState, leaf_specs: TrainState) -> None:
    """Raises ValueError if a shard lies along other mesh axes than in the first state."""
    leaves = leaves_with_shards(state._replace(accumulated=None, hook_state=()))
    for x, spec in zip(leaves, jax.tree.leaves(leaf_specs)):
        if is_shard(x) and x.layout.cut.spec != spec:
            raise ValueError(
                f"{x!r} of the state lies along {x.layout.cut.spec}, and the state that this step "
                f"began with along {spec}: create a separate step for parameters with another "
                "placement."
            )


def _check_group(group: Group, state: TrainState) -> None:
    """Raises ValueError if replicas outside this group hold the shards of a state."""
    probe = group.placement.place(np.zeros(()), REPLICATED)
    for x in shards_of(state):
        holders = _holders(x)
        members = _holders(replace(x, parts=probe, ranks=group.shard_ranks))
        if holders in (members, None):
            continue
        raise ValueError(
            f"the state is in shards that {holders} hold, and the replicas of this step are "
            f"{members}: continue with a step of the group that holds it, or save it there and "
            "restore it here (fddp.Checkpoints)."
        )


def _holders(shard: Shard) -> str | None:
    """Formats the ranks or devices of a shard's parts; None for shapes, or arrays on the host."""
    if shard.ranks is not None:
        return f"ranks {list(shard.ranks)} of the job"
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
    return list(map(_kind, leaves_with_shards((state.params, state.opt_state, state.model_state))))


def _kind(x: Any) -> tuple[Any, ...]:
    if is_shard(x):
        return True, x.nodes, jnp.shape(x.parts)
    return False, None, jnp.shape(x)
