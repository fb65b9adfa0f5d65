"""A step whose replicas share the state: each holds a part of it, and updates that part of the parameters.

A message of gradients is scattered, each replica updates what it got of it, and the new parameters are gathered: the
bytes of an all-reduce. Where only the optimizer's state is shared they are gathered at the step's end; where the
parameters rest in parts, too, at the beginning of the next, in the order in which the forward pass uses them. What the
update is, is not told anew: the very function that updates whole arrays is traced, and run on parts; what it needs
whole goes home for that.

Source: ZeRO (Rajbhandari et al., SC 2020), stages 1 and 3; `ZeroRedundancyOptimizer` in `torch.distributed.optim`;
PyTorch's FullyShardedDataParallel with `SHARD_GRAD_OP`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    plan_of_parts,
    take_apart,
    take_tail,
    there,
    unpack,
    unpack_rows,
    whole_forms,
)
from fddp.comm import Communicator, add_replica_dim, as_uint32, count_bytes, drop_replica_dim
from fddp.hooks import Reduction, reductions
from fddp.jaxpr import Follows, Kind, Ranks, Same, Stay, on_parts, spread, stays
from fddp.optim import kinds_of_state
from fddp.schedules import Pieces, Round
from fddp.step.homes import at_home, dealt
from fddp.step.replica import Replica, by_bucket
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, what the step tells), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def sharded_pieces(replica: Replica, plan: BucketPlan, uses: Sequence[int], update: Update) -> Pieces:
    """The pieces of such a step.

    Args:
      replica: what one replica does.
      plan: the buckets, of whole leaves.
      uses: the buckets in the order in which a forward pass uses what is in them.
      update: as a step of whole state has it.

    Returns:
      The pieces: gradients are scattered, parts are updated and gathered, or the other way round.
    """
    parts = Parts(replica, plan, plan_of_parts(plan), update)
    if replica.options.shard == "optimizer":
        return _gathered_last(parts, range(len(plan.buckets)))
    return _gathered_first(parts, uses)


def _gathered_last(parts: "Parts", order: Sequence[int]) -> Pieces:
    """The parameters are whole between steps: they are gathered as soon as they are updated."""

    def backward(state: TrainState, pending: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
        return parts.scattered(state, pending, rows)

    def update(state: TrainState, shards: Any, messages: Messages, kept: Any) -> tuple[Messages, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new.opt_state)
        told = new._replace(params=None, opt_state=equal), info
        return parts.gathered(new.params, order), (add_replica_dim(told), mine)

    def unpack(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        (new, info), mine = drop_replica_dim(kept[0]), kept[1]
        new = new._replace(params=parts.whole(state.params, messages, order))
        of_scatters, of_gathers = jnp.split(sent, [len(parts.scatters)])
        return (new, parts.sent(info, of_scatters, of_gathers, order)), mine

    rounds = (
        Round("backward", ("state", "pending", "rows"), backward, parts.scatters, "compute"),
        Round("update", ("state", "shards"), update, parts.gathers(order)),
    )
    return Pieces(rounds, unpack, "unpack")


def _gathered_first(parts: "Parts", order: Sequence[int]) -> Pieces:
    """The parameters rest in parts between steps: they are gathered where the forward pass begins to use them."""

    def packed(state: TrainState, shards: Any, *nothing: Any) -> tuple[Messages, Any]:
        return parts.gathered(parts.own(join(state, shards).params), order), ()

    def backward(state: TrainState, pending: Any, rows: Any, messages: Messages, kept: Any) -> tuple[Messages, Any]:
        state = state._replace(params=parts.whole(state.params, messages, order))
        return parts.scattered(state, pending, rows)

    def update(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new)
        of_gathers, of_scatters = jnp.split(sent, [len(order)])
        return (equal, parts.sent(info, of_scatters, of_gathers, order)), mine

    rounds = (
        Round("pack", ("state", "shards"), packed, parts.gathers(order)),
        Round("backward", ("state", "pending", "rows"), backward, parts.scatters, "compute"),
    )
    return Pieces(rounds, update)


@dataclass(frozen=True)
class Parts:
    """One replica's parts of the leaves, and how they travel."""

    replica: Replica
    plan: BucketPlan
    """The buckets, of whole leaves."""
    of_parts: BucketPlan
    """The same, of parts."""
    update: Update

    @property
    def scatters(self) -> tuple[Reduction, ...]:
        """How gradients are summed: each replica gets its parts of the sum, and all of loss and metrics."""
        each = zip(self.plan.messages, reductions(self.plan, None, None))
        return tuple(
            one
            if message.bucket is None
            else one._replace(collective="reduce_scatter", replicas=self.replica.group.size)
            for message, one in each
        )

    def gathers(self, order: Sequence[int]) -> tuple[Reduction, ...]:
        """How buckets of parameters come to all replicas, in this order."""
        of = {message.bucket: one for message, one in zip(self.plan.messages, self.scatters)}
        return tuple(of[k]._replace(name=f"gather {k}", collective="all_gather") for k in order)

    def scattered(self, state: TrainState, pending: Any, rows: Any) -> tuple[Messages, Any]:
        """The messages of gradients, and what is kept; the parameters are whole."""

        def packed(grads: Any, tail: Any) -> Messages:
            return add_tail(self.of_parts, pack_rows(self.of_parts, self.replica.group.size, grads), tail)

        return self.replica.local(packed, state, pending, rows)

    def gathered(self, params: Any, order: Sequence[int]) -> Messages:
        """The messages of parameters, of which this replica has its own parts."""
        travels = {i for bucket in self.plan.buckets for i in bucket.leaves}
        leaves = [x if i in travels else None for i, x in enumerate(self.plan.treedef.flatten_up_to(params))]
        buckets = pack(self.of_parts, self.plan.treedef.unflatten(leaves))
        return Messages(tuple(buckets[k] for k in order), ((), None))

    def whole(self, params: Any, messages: Messages, order: Sequence[int]) -> Any:
        """The parameters that have come from all replicas, among those that stay."""
        buckets = [array for _, array in sorted(zip(order, messages.arrays), key=lambda pair: pair[0])]
        came = unpack_rows(self.of_parts, self.plan, self.replica.group.size, buckets)
        # What has no elements does not travel.
        empty = [
            jnp.zeros(x.shape, leaf.dtype) if is_shard(x) else x for x, leaf in zip(_leaves(params), self.plan.leaves)
        ]
        leaves = zip(self.plan.treedef.flatten_up_to(came), empty)
        return self.plan.treedef.unflatten([old if new is None else new for new, old in leaves])

    def own(self, params: Any) -> Any:
        """This replica's parts of what is trained, flat, in place of shards and of whole leaves."""
        size, index = self.replica.group.size, self.replica.group.communicator.replica_index()
        chosen = set(self.replica.chosen(whole_forms(params)))
        leaves = [
            x.parts if is_shard(x) else own_part(x, size, index) if i in chosen else x
            for i, x in enumerate(_leaves(params))
        ]
        return self.plan.treedef.unflatten(leaves)

    def updated(self, state: TrainState, messages: Messages, kept: Any) -> tuple[TrainState, StepInfo]:
        """The next state, in shards where this one is and else with this replica's parts of the parameters."""
        mine, nothing = state._replace(params=self.own(state.params)), jnp.zeros(len(self.plan.messages), jnp.uint32)
        mean = self.replica.mean(self.of_parts, self._came, mine, messages, kept, nothing)
        comm, run = self.replica.group.communicator, partial(_run, self.replica, self.update, state, mine, mean)
        (new, info), sent = count_bytes(comm, run)
        return new, info._replace(sent=nothing.at[-1].add(as_uint32(sent)))

    def sent(self, info: StepInfo, of_scatters: Any, of_gathers: Any, order: Sequence[int]) -> StepInfo:
        """With the bytes of each bucket, there and back; at the end of what travels alone, or inside of the update."""
        of_buckets = by_bucket(self.plan, of_scatters).at[np.array(order, int)].add(of_gathers)
        return info._replace(sent=of_buckets + info.sent)

    def _came(self, messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(self.of_parts, messages)
        return self.plan.treedef.flatten_up_to(unpack(self.of_parts, buckets)), tail


def _run(
    replica: Replica, update: Update, state: TrainState, mine: TrainState, mean: Mean, comm: Communicator
) -> tuple[TrainState, StepInfo]:
    """The update of whole arrays, run on parts; the new state has shards where the old one has."""
    forms = jax.tree.map(_form, whole_forms(state))
    params, treedef = jax.tree.flatten(forms.params)
    chosen = set(replica.chosen(forms.params))
    of_params = treedef.unflatten([Follows(i) if i in chosen else _same(x) for i, x in enumerate(params)])
    of_grads = treedef.unflatten([Follows(i) if i in chosen else None for i in range(len(params))])
    of_state = kinds_of_state(forms.opt_state, replica.trained(forms.params), of_grads)
    of_mean = jax.tree.map(_same, mean._replace(grads=None))._replace(grads=of_grads)
    others = jax.tree.map(_same, forms._replace(params=None, opt_state=None))
    inputs = others._replace(params=of_params, opt_state=of_state), of_mean
    form_of_mean = jax.tree.map(_form, mean._replace(grads=None))._replace(grads=replica.trained(forms.params))
    with jax.sharding.use_abstract_mesh(replica.group.placement.view):
        program, out = jax.make_jaxpr(update, return_shape=True)(forms, form_of_mean)
    given = jax.tree.leaves(inputs, is_leaf=_is_kind)
    run = on_parts(program, given, _ranks(comm, stays(program, given)))
    new, info = jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((mine, mean))))

    def shard(old: Any, new: Any) -> Any:
        # What an optimizer has set anew is a number of any size.
        return Shard(spread(new, old.parts.shape), old.shape) if is_shard(old) else new

    held = jax.tree.map(shard, (state.params, state.opt_state), (new.params, new.opt_state), is_leaf=is_shard)
    return new._replace(params=held[0], opt_state=held[1]), info


def _ranks(comm: Communicator, stays: Mapping[int, Stay]) -> Ranks:
    """What a replica knows of its parts, and how it talks to the others."""
    homes = dealt({leaf: stay.operations for leaf, stay in stays.items()}, comm.size)

    def exists(size: int) -> Array:
        return there(size, comm.size, comm.replica_index())

    return Ranks(exists, partial(_put_together, comm), partial(at_home, comm, homes))


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


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _same(x: Any) -> Same:
    return Same(x.size == 1)


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
