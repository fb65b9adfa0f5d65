"""A state as replicas hold it: made in a program, described by forms, and looked for in a state that a step is given.

The step's way says what is cut and what is copied (`hold` in `step/way.py`); here it is asked with arrays of a program,
with forms, and with the forms of a given state.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fddp.buckets import (
    UNCUT,
    DeviceCut,
    Shard,
    copy_of,
    cut_as_leaf,
    device_cut,
    is_shard,
    join,
    own_part,
    part_dims,
    take_apart,
    whole_forms,
)
from fddp.comm import REPLICATED, Group, Placement, described, device_parts, of_one_replica, shortened, specs
from fddp.optim import Optimizer, optimizer_laid_out
from fddp.step.replica import Replica, with_trained
from fddp.step.state import TrainState
from fddp.step.way import Held


def first_held(replica: Replica, optimizer: Optimizer, where: Any, params: Any, model_state: Any) -> tuple[Any, Any]:
    """Makes what a replica holds of the first parameters, optimizer's state and buffers; inside a program.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      where: a tree like those that are trained: where the parts of each lie, if a replica is several devices.
      params: the parameters, whole.
      model_state: the buffers.

    Returns:
      `Held`, taken apart: what all replicas have alike, and this replica's parts.
    """
    trained = replica.trained(params)
    # Copied: an optimizer may keep the parameters themselves, and memory can be donated only once.
    opt_state = jax.tree.map(jnp.copy, optimizer.init(trained))
    opt_state = optimizer_laid_out(replica.group.placement.other_axes, opt_state, trained, where)
    return take_apart(in_shards(replica, where, trained, opt_state, model_state))


def in_shards(replica: Replica, where: Any, trained: Any, opt_state: Any, model_state: Any) -> Held:
    """Cuts a state into what a step holds of it; inside a program, where each replica makes its own parts.

    Args:
      replica: what one replica does.
      where: a tree like `trained`: where the parts of each lie, if a replica is several devices.
      trained: the parameters that are trained, None in place of others.
      opt_state: the optimizer's state for them.
      model_state: the buffers.

    Returns:
      What is held; None for what stays as it is.
    """
    group = replica.group
    lies = _lying(replica, trained, where)

    def cut(x: Any, leaf: int) -> Shard:
        depth, devices = lies(x, leaf)
        part = own_part(x, group.parts, group.communicator.at("shards").replica_index(), depth, devices)
        return _shard(group, part, x, depth, devices)

    return replica.way.hold(replica, trained, opt_state, model_state, cut, partial(copy_of, group.copy_ranks))


def form_in_shards(replica: Replica, state: TrainState, where: Any) -> TrainState:
    """The form of a state that a step holds, as all replicas together have it.

    Args:
      replica: what one replica does.
      state: whole arrays, or their forms.
      where: a tree like the parameters that are trained: where the parts of each lie, if a replica is several devices.

    Returns:
      The state with forms of shards, where the step has them.
    """
    group = replica.group
    trained = replica.trained(state.params)
    lies = _lying(replica, trained, where)
    count = group.placement.replicas_in_array

    def form(dims: tuple[int, ...], x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count * dims[0], *dims[1:]), jnp.result_type(x))

    def cut(x: Any, leaf: int) -> Shard:
        depth, devices = lies(x, leaf)
        return _shard(group, form(part_dims(x.size, group.parts, depth), x), x, depth, devices)

    def copy(x: Any) -> Shard:
        return Shard(form((x.size,), x), x.shape, copies=True, ranks=group.copy_ranks)

    return with_held(state, replica.way.hold(replica, trained, state.opt_state, state.model_state, cut, copy))


def _shard(group: Group, parts: Any, x: Any, depth: int, cut: DeviceCut) -> Shard:
    """An array in parts, one for each of the replicas that share a state."""
    nodes = group.nodes if group.placement.on_mesh else None
    return Shard(parts, jnp.shape(x), ranks=group.shard_ranks, depth=depth, nodes=nodes, cut=cut)


def with_held(state: TrainState, held: Held) -> TrainState:
    """Puts what is held into a state, in the places of what does not stay as it is."""
    params, opt_state, model_state = held
    state = state._replace(params=with_trained(state.params, params), opt_state=opt_state)
    return state if model_state is None else state._replace(model_state=model_state)


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
    held = join(device_parts(placement, equal), shards)._replace(hook_state=hook_state, accumulated=accumulated)
    return jax.tree.map(lambda x: _of_device(x) if is_shard(x) else x, held, is_leaf=is_shard)


def check_held(replica: Replica, state: TrainState) -> TrainState:
    """Says that a state is not held as the step holds it.

    Args:
      replica: what one replica does.
      state: what a step was given.

    Returns:
      The state as gradients go by it, with forms of whole arrays in place of shards.

    Raises:
      ValueError: it is whole and ought to be in shards, or the other way round, or other replicas
        hold the shards, or it belongs to another optimizer.
    """
    seen = whole_forms(replica.way.seen(replica, state))
    got = _kinds(state)
    if not replica.way.apart and any(shard for shard, *_ in got):
        raise ValueError(
            "the state is in shards, and this step was made without shard=: give it 'optimizer' or 'state', or "
            "give the step fddp.whole(state)."
        )
    _check_optimizer(replica, whole_forms(state))
    if replica.way.apart and got != _kinds(_form_of_whole(replica, whole_forms(state))):
        raise ValueError(
            f"the state is not in shards of {replica.group.parts} replicas, as a step with {replica.way.name} has it: "
            "go on with what step.init or the last step returned, or from a checkpoint; fddp.whole(state) is for "
            "looking at it."
        )
    _check_group(replica.group, state)
    _check_pending(replica, state)
    _check_memory(replica, seen)
    return seen


def _check_optimizer(replica: Replica, state: TrainState) -> None:
    """Refuses a state of another optimizer, and one for other trained parameters."""
    if replica.way.init is None:
        return
    form = jax.eval_shape(replica.way.init, replica.trained(state.params))
    trees = state.opt_state, form
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in trees]
    nodes = [jax.tree.structure(tree) for tree in trees]
    if shapes[0] == shapes[1] and nodes[0] == nodes[1]:
        return
    has, needs = (described("", tree) for tree in trees)
    more = shortened([x for x in has if x not in needs])
    less = shortened([x for x in needs if x not in has])
    if not (more or less):  # the same arrays in other nodes
        more, less = nodes
    raise ValueError(
        "the state belongs to another optimizer, or to other trained parameters (ignore=): its "
        f"opt_state has {more or 'nothing else'}, and this step's {less or 'nothing else'}. "
        "Make one with step.init(fddp.whole(state.params))."
    )


def _form_of_whole(replica: Replica, state: TrainState) -> TrainState:
    """The form of a state that a step holds, of forms of whole arrays that tell where they lie."""
    return form_in_shards(replica, state, specs(replica.group.placement, replica.trained(state.params)))


def _lying(replica: Replica, trained: Any, where: Any) -> Callable[[Any, int], tuple[int, DeviceCut]]:
    """Tells how an array that belongs to a trained leaf is cut into rows, and among the devices of a replica."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(trained)]
    view = replica.group.placement.view
    cuts = [device_cut(view, spec, shape) for spec, shape in zip(jax.tree.leaves(where), shapes)]
    return lambda x, leaf: cut_as_leaf(x.size, shapes[leaf], replica.group.parts, cuts[leaf])


def _of_device(shard: Shard) -> Shard:
    """The part of a replica's part that one of its devices holds, as forms."""
    rows, *more = shard.parts.shape
    cut = shard.cut
    parts = jax.ShapeDtypeStruct((rows // cut.parts, *more), shard.parts.dtype)
    return replace(shard, parts=parts, shape=cut.of_device(shard.shape), depth=shard.depth // cut.parts, cut=UNCUT)


def check_cuts(state: TrainState, where: TrainState) -> None:
    """Says that devices of replicas hold other parts of a state than of the one that a step began with.

    Args:
      state: what a step was given.
      where: a tree like it: where the parts of each array lay at first.

    Raises:
      ValueError: a shard is cut along other dims, or other axes.
    """
    leaves = jax.tree.leaves(state._replace(accumulated=None, hook_state=()), is_leaf=is_shard)
    for x, spec in zip(leaves, jax.tree.leaves(where)):
        if is_shard(x) and x.cut.spec != spec:
            raise ValueError(
                f"{x!r} of the state lies along {x.cut.spec}, and the state that this step began with along {spec}: "
                "make a step of its own for parameters that are placed in another way."
            )


def _check_group(group: Group, state: TrainState) -> None:
    """Says that other replicas hold the shards of a state, as many as this group has."""
    shards = [x for x in jax.tree.leaves(state, is_leaf=is_shard) if is_shard(x)]
    here = group.placement.place(np.zeros(()), REPLICATED)
    for x in shards:
        held_by = _holders(x)
        own = _holders(Shard(here, (), ranks=group.copy_ranks if x.copies else group.shard_ranks))
        if held_by in (own, None):
            continue
        raise ValueError(
            f"the state is in shards that {held_by} hold, and the replicas of this step are {own}: go on with a step "
            "of the group that holds it, or save it there and restore it here (fddp.Checkpoints)."
        )


def _holders(shard: Shard) -> str | None:
    """Names those who hold the parts, in order; None: these are forms, or arrays of the host."""
    if shard.ranks is not None:
        return f"ranks {list(shard.ranks)} of the job"
    mesh = getattr(getattr(shard.parts, "sharding", None), "mesh", None)
    return f"devices {[x.id for x in mesh.devices.flat]}" if isinstance(mesh, Mesh) else None


def _check_pending(replica: Replica, state: TrainState) -> None:
    """Says that sums are pending of another number of replicas."""
    count = replica.group.placement.replicas_in_array
    for pending in jax.tree.leaves(state.accumulated)[:1]:
        if len(pending) != count:
            raise ValueError(
                f"the state has gradients pending of {len(pending)} replicas, this group has "
                f"{count}; synchronize with a step before the number of replicas changes."
            )


def _check_memory(replica: Replica, state: TrainState) -> None:
    """Says that what hooks remember comes from another hook or another number of replicas."""
    share = replica.group.placement.replicas_in_array
    got = described("", state.hook_state)
    wanted = described("", replica.memory_form(state.params))
    if got != wanted:
        raise ValueError(
            f"the state's hook_state is not that of {replica.options.hook} on {share} replicas: it has "
            f"{'; '.join(got) or 'nothing'} instead of {'; '.join(wanted) or 'nothing'}. Take the one of a new "
            "step.init(params), and what was remembered is lost, or the hook and replicas it was made with."
        )


def _kinds(state: TrainState) -> list[tuple[Any, ...]]:
    held = (state.params, state.opt_state, state.model_state)
    return [_kind(x) for x in jax.tree.leaves(held, is_leaf=is_shard)]


def _kind(x: Any) -> tuple[Any, ...]:
    return (True, x.copies, x.nodes, jnp.shape(x.parts)) if is_shard(x) else (False, False, None, jnp.shape(x))
