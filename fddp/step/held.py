"""The state as replicas hold it: sharded, copied or replicated, as the way's `hold` decides.

`hold` runs on the arrays of a program for the first state, and on shapes and dtypes to check a
user's state.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from fddp.buckets import (
    UNCUT,
    DeviceCut,
    Shard,
    copy_of,
    cut_as_leaf,
    device_cut,
    insert_shards,
    is_shard,
    own_part,
    part_dims,
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
from fddp.optim import Optimizer, optimizer_laid_out
from fddp.step.replica import Replica, with_trained
from fddp.step.state import TrainState
from fddp.step.way import Held


def first_held(
    replica: Replica, optimizer: Optimizer, layout: Any, params: PyTree, model_state: PyTree
) -> tuple[Any, Any]:
    """Makes a replica's share of the first state from whole parameters; inside a program.

    Returns (replicated tree, this replica's shards). `layout` is a tree of `PartitionSpec`s.
    """
    trained = replica.trained(params)
    # Copied because an optimizer state may contain the parameters, and an array is donated once.
    opt_state = jax.tree.map(jnp.copy, optimizer.init(trained))
    opt_state = optimizer_laid_out(replica.group.placement.other_axes, opt_state, trained, layout)
    return take_apart(in_shards(replica, layout, trained, opt_state, model_state))


def in_shards(
    replica: Replica, layout: Any, trained: PyTree, opt_state: PyTree, model_state: PyTree
) -> Held:
    """Cuts a replica's share from whole arrays; inside a program."""
    group = replica.group
    cut_of = _lying(replica, trained, layout)

    def cut(x: jax.Array, leaf: int) -> Shard:
        depth, devices = cut_of(x, leaf)
        part = own_part(
            x, group.parts, group.communicator.at("shards").replica_index(), depth, devices
        )
        return _shard(group, part, x, depth, devices)

    return replica.way.hold(
        replica, trained, opt_state, model_state, cut, partial(copy_of, group.copy_ranks)
    )


def form_in_shards(replica: Replica, state: TrainState, layout: Any) -> TrainState:
    """Returns shapes and dtypes of a step's state, with the shards of all replicas in one array.

    `state` has whole arrays, or their shapes and dtypes.
    """
    group = replica.group
    trained = replica.trained(state.params)
    cut_of = _lying(replica, trained, layout)
    count = group.placement.replicas_in_array

    def form(dims: tuple[int, ...], x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count * dims[0], *dims[1:]), jnp.result_type(x))

    def cut(x: jax.Array | jax.ShapeDtypeStruct, leaf: int) -> Shard:
        depth, devices = cut_of(x, leaf)
        return _shard(group, form(part_dims(x.size, group.parts, depth), x), x, depth, devices)

    def copy(x: jax.Array | jax.ShapeDtypeStruct) -> Shard:
        return Shard(form((x.size,), x), x.shape, copies=True, ranks=group.copy_ranks)

    return with_held(
        state, replica.way.hold(replica, trained, state.opt_state, state.model_state, cut, copy)
    )


def _shard(group: Group, data: Any, x: Any, depth: int, cut: DeviceCut) -> Shard:
    """Makes a shard for the replicas that share a state."""
    nodes = group.nodes if group.placement.on_mesh else None
    return Shard(data, jnp.shape(x), ranks=group.shard_ranks, depth=depth, nodes=nodes, cut=cut)


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
    return jax.tree.map(lambda x: _of_device(x) if is_shard(x) else x, share, is_leaf=is_shard)


def check_held(replica: Replica, state: TrainState) -> TrainState:
    """Raises ValueError unless a state fits the step: its shards, replicas, optimizer and hook.

    Returns the state that gradients are computed for, with shapes of whole arrays in place of
    shards.
    """
    gradient_state = whole_forms(replica.way.seen(replica, state))
    kinds = _kinds(state)
    if not replica.way.apart and any(shard for shard, *_ in kinds):
        raise ValueError(
            "the state is in shards, and this step was made without shard=: give it 'optimizer' or "
            "'state', or give the step fddp.whole(state)."
        )
    _check_optimizer(replica, whole_forms(state))
    if replica.way.apart and kinds != _kinds(_form_of_whole(replica, whole_forms(state))):
        raise ValueError(
            f"the state is not in shards of {replica.group.parts} replicas, as a step with "
            f"{replica.way.name} has it: continue with the state that step.init or the last step "
            "returned, or from a checkpoint; fddp.whole(state) is only for reading it."
        )
    _check_group(replica.group, state)
    _check_pending(replica, state)
    _check_memory(replica, gradient_state)
    return gradient_state


def _check_optimizer(replica: Replica, state: TrainState) -> None:
    """Raises ValueError if `opt_state` belongs to another optimizer or other trained leaves."""
    if replica.way.init is None:
        return
    expected = jax.eval_shape(replica.way.init, replica.trained(state.params))
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
    return form_in_shards(
        replica, state, specs(replica.group.placement, replica.trained(state.params))
    )


def _lying(
    replica: Replica, trained: PyTree, layout: Any
) -> Callable[[Any, int], tuple[int, DeviceCut]]:
    """Makes a function (array, trained leaf) → (rows to cut separately, device cut)."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(trained)]
    view = replica.group.placement.view
    cuts = [device_cut(view, spec, shape) for spec, shape in zip(jax.tree.leaves(layout), shapes)]
    return lambda x, leaf: cut_as_leaf(x.size, shapes[leaf], replica.group.parts, cuts[leaf])


def _of_device(shard: Shard) -> Shard:
    """Returns one device's part of a replica's shard, as shape and dtype."""
    rows, *dims = shard.parts.shape
    cut = shard.cut
    local = jax.ShapeDtypeStruct((rows // cut.parts, *dims), shard.parts.dtype)
    return replace(
        shard,
        parts=local,
        shape=cut.of_device(shard.shape),
        depth=shard.depth // cut.parts,
        cut=UNCUT,
    )


def check_cuts(state: TrainState, layout: TrainState) -> None:
    """Raises ValueError if a shard lies along other mesh axes than in the first state."""
    leaves = jax.tree.leaves(state._replace(accumulated=None, hook_state=()), is_leaf=is_shard)
    for x, spec in zip(leaves, jax.tree.leaves(layout)):
        if is_shard(x) and x.cut.spec != spec:
            raise ValueError(
                f"{x!r} of the state lies along {x.cut.spec}, and the state that this step began "
                f"with along {spec}: create a separate step for parameters with another placement."
            )


def _check_group(group: Group, state: TrainState) -> None:
    """Raises ValueError if replicas outside this group hold the shards of a state."""
    shards = [x for x in jax.tree.leaves(state, is_leaf=is_shard) if is_shard(x)]
    probe = group.placement.place(np.zeros(()), REPLICATED)
    for x in shards:
        holders = _holders(x)
        members = _holders(
            Shard(probe, (), ranks=group.copy_ranks if x.copies else group.shard_ranks)
        )
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
    """Raises ValueError if the pending sums come from another number of replicas."""
    count = replica.group.placement.replicas_in_array
    for pending in jax.tree.leaves(state.accumulated)[:1]:
        if len(pending) != count:
            raise ValueError(
                f"the state has gradients pending of {len(pending)} replicas, this group has "
                f"{count}; synchronize with a step before the number of replicas changes."
            )


def _check_memory(replica: Replica, state: TrainState) -> None:
    """Raises ValueError if the hook state comes from another hook or number of replicas."""
    share = replica.group.placement.replicas_in_array
    actual = described("", state.hook_state)
    expected = described("", replica.memory_form(state.params))
    if actual != expected:
        raise ValueError(
            f"the state's hook_state is not that of {replica.options.hook} on {share} replicas: it "
            f"has {'; '.join(actual) or 'nothing'} instead of {'; '.join(expected) or 'nothing'}. "
            "Use that of a new step.init(params), which resets the hook's memory, or the original "
            "hook and replicas."
        )


def _kinds(state: TrainState) -> list[tuple[Any, ...]]:
    trees = (state.params, state.opt_state, state.model_state)
    return [_kind(x) for x in jax.tree.leaves(trees, is_leaf=is_shard)]


def _kind(x: Any) -> tuple[Any, ...]:
    return (
        (True, x.copies, x.nodes, jnp.shape(x.parts))
        if is_shard(x)
        else (False, False, None, jnp.shape(x))
    )
