"""A step whose replicas share the optimizer's state: each holds a part of it, and updates that part of the parameters.

A message of gradients is scattered, each replica updates what it got of it, and the new parameters are gathered: the
bytes of an all-reduce. What the update is, is not told anew: the very function that updates whole arrays is traced, and
run on parts.

Source: ZeRO (Rajbhandari et al., SC 2020), stage 1; `ZeroRedundancyOptimizer` in `torch.distributed.optim`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    Messages,
    Shard,
    add_tail,
    is_shard,
    join,
    own_part,
    pack,
    pack_rows,
    part_size,
    plan_of_parts,
    take_apart,
    take_tail,
    there,
    unpack,
    unpack_rows,
)
from fddp.comm import Communicator, Group, add_replica_dim, drop_replica_dim
from fddp.hooks import reductions
from fddp.jaxpr import Follows, Kind, Same, on_parts, spread
from fddp.optim import divided, kinds_of_state
from fddp.schedules import Pieces, Round
from fddp.step.replica import Replica
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, what the step tells), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def check_shards(replica: Replica, optimizer: optax.GradientTransformation, params: Any) -> None:
    """Says what of an optimizer's state cannot be held in parts.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      params: the parameters that it trains, or their forms.

    Raises:
      ValueError: its update needs whole leaves.
    """
    if not replica.options.shard:
        return
    if isinstance(params, optax.LookaheadParams):
        raise ValueError("shard='optimizer' does not know optax.lookahead, which has two sets of parameters.")
    trained = replica.trained(params)
    if sum(x.size for x in jax.tree.leaves(trained)) <= 1:
        raise ValueError("shard='optimizer' has nothing to share: no more than one number is trained; leave it out.")
    whole = divided(optimizer, trained).whole
    if whole:
        named = jax.tree_util.tree_leaves_with_path(trained)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
        told = [f"{names[leaf]} ({why})" for leaf, why in sorted(whole.items())]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(
            f"shard='optimizer' gives each replica a part of every leaf, and this optimizer's update needs whole: "
            f"{', '.join(told[:3])}{more}. Leave shard out, or take an optimizer that works element by element; norms "
            "over all of a leaf or of all leaves are fine."
        )


def check_state(replica: Replica, state: TrainState) -> None:
    """Says that an optimizer's state is not held as the step holds it.

    Args:
      replica: what one replica does.
      state: what a step was given.

    Raises:
      ValueError: it is whole and ought to be in shards, or the other way round, or in shards of other replicas.
    """
    group, shards = replica.group, list(filter(is_shard, _held(state.opt_state)))
    if not replica.options.shard:
        if shards:
            raise ValueError(
                "the optimizer's state is in shards, and this step was made without shard='optimizer': give one of "
                "them, or fddp.whole(state)."
            )
        return
    whole = jax.tree.map(_whole_form, state.opt_state, is_leaf=is_shard)
    expected = forms_in_shards(group, whole, replica.trained(state.params))
    got = [(is_shard(x), jnp.shape(x.parts if is_shard(x) else x)) for x in _held(state.opt_state)]
    if got != [(is_shard(x), x.parts.shape if is_shard(x) else x.shape) for x in _held(expected)]:
        raise ValueError(
            f"the optimizer's state is not in shards of {group.size} replicas: go on with what step.init or the last "
            "step returned, or from a checkpoint; fddp.whole(state) is for looking at it."
        )


def in_shards(group: Group, opt_state: Any, params: Any) -> Any:
    """An optimizer's state in shards, of which each replica makes its own; inside a program.

    Args:
      group: the replicas.
      opt_state: of whole parameters.
      params: these.

    Returns:
      The state: a `Shard` for each array that goes with a parameter.
    """
    return _cut(opt_state, params, lambda x: own_part(x, group.size, group.communicator.replica_index()))


def forms_in_shards(group: Group, opt_state: Any, params: Any) -> Any:
    """The form of what `in_shards` makes, as all replicas together have it."""
    held = group.placement.replicas_in_array

    def part(x: Any) -> Any:
        return jax.ShapeDtypeStruct((part_size(x.size, group.size) * held,), x.dtype)

    return _cut(opt_state, params, part)


def sharded_pieces(replica: Replica, plan: BucketPlan, update: Update) -> Pieces:
    """The pieces of such a step.

    Args:
      replica: what one replica does.
      plan: the buckets, of whole leaves.
      update: as a step of whole state has it.

    Returns:
      The pieces: gradients are scattered; parts are updated and gathered.
    """
    replicas, comm, of_parts = replica.group.size, replica.group.communicator, plan_of_parts(plan, replica.group.size)
    each = list(zip(plan.messages, reductions(plan, None, None)))
    parted = [one._replace(replicas=replicas) for message, one in each if message.bucket is not None]
    scattered = {one.name: one._replace(collective="reduce_scatter") for one in parted}
    gathered = [one._replace(name=f"gather {k}", collective="all_gather") for k, one in enumerate(parted)]

    def pack_gradients(grads: Any, tail: Any) -> Messages:
        return add_tail(of_parts, pack_rows(of_parts, replicas, grads), tail)

    def unpack_gradients(messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(of_parts, messages)
        return plan.treedef.flatten_up_to(unpack(of_parts, buckets)), tail

    def update_parts(state: TrainState, shards: Any, messages: Messages, kept: Any) -> tuple[Messages, Any]:
        mine, index = _parts(replica, state, shards), comm.replica_index()
        nothing = jnp.zeros(len(plan.messages), jnp.uint32)
        mean = replica.mean(of_parts, unpack_gradients, mine, messages, kept, nothing)
        exists = lambda leaf: there(plan.leaves[leaf].size, replicas, index)  # noqa: E731
        new, info = _run(replica, update, state, mine, mean, exists, partial(_put_together, comm))
        equal, parts = take_apart(new.opt_state)
        told = new._replace(params=None, opt_state=equal), info
        sent = Messages(pack(of_parts, _of_plan(of_parts, new.params)), ((), None))
        return sent, (add_replica_dim(told), parts)

    def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        del shards
        (new, info), parts = drop_replica_dim(kept[0]), kept[1]
        came = plan.treedef.flatten_up_to(unpack_rows(of_parts, plan, replicas, messages.arrays))
        params = [old if x is None else x for old, x in zip(jax.tree.leaves(state.params), came)]
        first, second = sent[: len(plan.messages)], sent[len(plan.messages) :]
        first = jnp.roll(first, -1) if plan.messages[0].bucket is None else first
        info = info._replace(sent=first.at[: len(second)].add(second))
        return (new._replace(params=plan.treedef.unflatten(params)), info), parts

    def backward(state: TrainState, pending: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
        return replica.local(pack_gradients, state, pending, rows)

    scatters = tuple(scattered.get(one.name, one) for _, one in each)
    rounds = (
        Round("backward", ("state", "pending", "rows"), backward, scatters, "compute"),
        Round("update", ("state", "shards"), update_parts, tuple(gathered)),
    )
    return Pieces(rounds, finish, "unpack")


def _cut(opt_state: Any, params: Any, part: Callable[[Any], Any]) -> Any:
    def cut(kind: Kind, x: Any) -> Any:
        return Shard(part(x), x.shape) if isinstance(kind, Follows) else x

    return jax.tree.map(cut, kinds_of_state(opt_state, params), opt_state, is_leaf=_is_kind)


def _of_plan(plan: BucketPlan, tree: Any) -> Any:
    """The leaves that travel, None in place of others."""
    travels = {i for bucket in plan.buckets for i in bucket.leaves}
    leaves = plan.treedef.flatten_up_to(tree)
    return plan.treedef.unflatten([x if i in travels else None for i, x in enumerate(leaves)])


def _parts(replica: Replica, state: TrainState, shards: Sequence[Array]) -> TrainState:
    """A replica's own part of a state: of all that is trained, flat."""
    index, chosen = replica.group.communicator.replica_index(), set(replica.chosen(state.params))
    leaves, treedef = jax.tree.flatten(state.params)
    params = [own_part(x, replica.group.size, index) if i in chosen else x for i, x in enumerate(leaves)]
    return state._replace(params=treedef.unflatten(params), opt_state=join(state.opt_state, shards))


def _run(
    replica: Replica,
    update: Update,
    state: TrainState,
    mine: TrainState,
    mean: Mean,
    exists: Callable[[int], Array],
    put_together: Callable[[str, Sequence[Array]], Sequence[Array]],
) -> tuple[TrainState, StepInfo]:
    """The update of whole arrays, run on parts; the new state has shards where the old one has."""
    params, treedef = jax.tree.leaves(state.params), jax.tree.structure(state.params)
    chosen = replica.chosen(state.params)
    whole_params = treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params])
    whole_opt = jax.tree.map(_whole_form, mine.opt_state, is_leaf=is_shard)
    numbers = treedef.unflatten([Follows(i) if i in chosen else Same(x.size == 1) for i, x in enumerate(params)])
    grads = treedef.unflatten([whole if i in chosen else None for i, whole in enumerate(jax.tree.leaves(whole_params))])

    forms = (
        jax.tree.map(_whole_form, mine._replace(params=None, opt_state=None))._replace(
            params=whole_params, opt_state=whole_opt
        ),
        jax.tree.map(_whole_form, mean._replace(grads=None))._replace(grads=grads),
    )
    of_grads = treedef.unflatten([Follows(i) if i in chosen else None for i in range(len(params))])
    of_state = kinds_of_state(whole_opt, replica.trained(whole_params), of_grads)
    same = lambda tree: jax.tree.map(lambda x: Same(x.size == 1), tree)  # noqa: E731
    inputs = (
        same(forms[0]._replace(params=None, opt_state=None))._replace(params=numbers, opt_state=of_state),
        same(forms[1]._replace(grads=None))._replace(grads=of_grads),
    )
    with jax.sharding.use_abstract_mesh(replica.group.placement.view):
        program, out = jax.make_jaxpr(update, return_shape=True)(*forms)
    run = on_parts(program, jax.tree.leaves(inputs, is_leaf=_is_kind), exists, put_together)
    new, info = jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((mine, mean))))

    def shard(old: Any, new: Any) -> Any:
        # What an optimizer has set anew is a number of any size.
        return Shard(spread(new, old.parts.shape), old.shape) if is_shard(old) else new

    return new._replace(opt_state=jax.tree.map(shard, mine.opt_state, new.opt_state, is_leaf=is_shard)), info


def _put_together(comm: Communicator, op: str, numbers: Sequence[Array]) -> list[Array]:
    """Numbers of all replicas, put together in their order: the same bits on all."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    found = list[Array](numbers)
    for dtype in dict.fromkeys(x.dtype for x in numbers):
        places = [k for k, x in enumerate(numbers) if x.dtype == dtype]
        mine = jnp.stack([numbers[k].reshape(()) for k in places])
        sent = mine.astype(jnp.uint8) if jnp.issubdtype(dtype, jnp.bool_) else mine
        made = reduce(comm.all_gather(sent), axis=0).astype(dtype)
        for k, x in zip(places, made):
            found[k] = x.reshape(numbers[k].shape)
    return found


def _held(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)


def _whole_form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x.parts if is_shard(x) else x))


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
