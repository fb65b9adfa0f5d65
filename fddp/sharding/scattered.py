"""A step whose replicas share the state: each holds a part of it, and updates that part of the parameters.

A message of gradients is scattered, each replica updates what it got of it, and the new parameters are gathered: the
bytes of an all-reduce. Where only the optimizer's state is shared they are gathered at the step's end; where the
parameters rest in parts, too, at the beginning of the next, in the order in which the forward pass uses them. The
gradients of each micro-batch are scattered under the next one's forward and backward pass, and what adds up is a part.

Source: ZeRO (Rajbhandari et al., SC 2020), stages 1 to 3, of which the second is for micro-batches;
`ZeroRedundancyOptimizer` in `torch.distributed.optim`; PyTorch's FullyShardedDataParallel with `SHARD_GRAD_OP`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    Message,
    Messages,
    add_tail,
    depth_of,
    is_shard,
    join,
    own_part,
    pack,
    pack_rows,
    plan_of_parts,
    take_apart,
    take_tail,
    unpack,
    unpack_rows,
    whole_forms,
)
from fddp.comm import Communicator, add_replica_dim, as_uint32, count_bytes, drop_replica_dim
from fddp.hooks import Reduction, reductions
from fddp.losses import added, in_parts
from fddp.schedules import Pieces, Round, by_bucket
from fddp.sharding.parts_update import Update, run_on_parts
from fddp.step import Replica, StepInfo, TrainState


def gathered_last(replica: Replica, plan: BucketPlan, use: Update) -> Pieces:
    """The pieces of a step whose parameters are whole between steps: they are gathered as soon as they are updated.

    Args:
      replica: what one replica does.
      plan: the buckets, of whole leaves.
      use: the update, as a step of whole state has it.

    Returns:
      The pieces.
    """
    parts = Parts(replica, plan, plan_of_parts(plan), use)
    order = range(len(plan.buckets))

    def begin(state: TrainState, pending: Any, messages: Messages) -> Before:
        return Before(None, pending)

    def update(state: TrainState, shards: Any, messages: Messages, kept: Any) -> tuple[Messages, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new.opt_state)
        told = new._replace(params=None, opt_state=equal), info
        return parts.gathered(new.params, order), (add_replica_dim(told), mine)

    def unpack(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        new, info = drop_replica_dim(kept[0])
        mine = kept[1]
        new = new._replace(params=parts.whole(state.params, messages, order))
        of_scatters, of_gathers = jnp.split(sent, [sent.size - len(order)])
        return (new, parts.sent(info, of_scatters, of_gathers, order)), mine

    rounds = *_micro_batches(parts, begin), Round("update", ("state", "shards"), update, parts.gathers(order))
    return Pieces(rounds, unpack, "unpack")


def gathered_first(replica: Replica, plan: BucketPlan, order: Sequence[int], use: Update) -> Pieces:
    """The pieces of a step whose parameters rest in parts: they are gathered where the forward pass begins to use them.

    Args:
      replica: what one replica does.
      plan: the buckets, of whole leaves.
      order: the buckets in the order in which a forward pass uses what is in them.
      use: the update, as a step of whole state has it.

    Returns:
      The pieces.
    """
    parts = Parts(replica, plan, plan_of_parts(plan), use)

    def packed(state: TrainState, shards: Any, *nothing: Any) -> tuple[Messages, Any]:
        return parts.gathered(parts.own(join(state, shards).params), order), ()

    def begin(state: TrainState, pending: Any, messages: Messages) -> Before:
        return Before(parts.whole(state.params, messages, order), pending)

    def update(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new)
        of_gathers, of_scatters = jnp.split(sent, [len(order)])
        return (equal, parts.sent(info, of_scatters, of_gathers, order)), mine

    rounds = Round("pack", ("state", "shards"), packed, parts.gathers(order)), *_micro_batches(parts, begin)
    return Pieces(rounds, update)


class Before(NamedTuple):
    """A replica's values when a micro-batch begins."""

    params: Any
    """Whole parameters; None: those of the state are."""
    pending: Any
    """Everything that is pending, without the gradients that were sent."""
    broken: Any = None
    """Marks this replica's own gradients that were not all finite, where that is asked."""
    sums: tuple[tuple[Array, ...], ...] = ()
    """Its parts of the sums of gradients that came back, a bucket each: terms that are still to be added."""
    number: Any = np.zeros(1, np.int32)
    """The micro-batch's number."""


def _micro_batches(parts: "Parts", begin: Callable[[TrainState, Any, Messages], Before]) -> list[Round]:
    """A round for each micro-batch: what adds up from one to the next is a part of the gradients.

    Args:
      parts: of one replica.
      begin: (state, pending, what came back before) → what is there at first.

    Returns:
      The rounds; with the last one travel loss, metrics and buffers, and it keeps what those before it brought.
    """
    replica = parts.replica
    plan = parts.of_parts
    of = replica.options.accumulation_steps

    def one(number: int) -> Round:
        def backward(state: TrainState, pending: Any, rows: Any, came: Messages, kept: Any) -> tuple[Messages, Any]:
            before = _following(kept, came) if number else begin(state, pending, came)
            if before.params is not None:
                state = state._replace(params=before.params)
            # By a number that is given equal micro-batches are equal programs.
            part = jax.tree.map(lambda x: x[before.number[0]], in_parts(rows, of))
            grads, pending, broken = replica.gradients(state, before.pending, part, 1)
            broken = add_replica_dim(broken)
            broken = broken if before.broken is None else before.broken | broken
            buckets = pack_rows(plan, replica.group.size, grads)
            if number == of - 1:
                tail, own = replica.tail(pending, rows)
                return add_tail(plan, buckets, tail), (add_replica_dim(own), broken, before.sums)
            sums = (reduce(added, before.sums),) if number else ()
            whole = add_replica_dim(before.params)  # as it crosses a program's border
            kept = Before(whole, add_replica_dim(pending), broken, sums, before.number + 1)
            return Messages(buckets, ((), None)), kept

        given = ("state", "pending", "rows")
        name = f"micro-batch {number}"
        if number == of - 1:
            return Round("backward", given, backward, parts.scatters, "compute")
        return Round(f"{name} backward", given, backward, parts.scatters_of(name), "compute")

    return [one(number) for number in range(of)]


def _following(kept: Before, came: Messages) -> Before:
    """The values that are there when the next micro-batch begins."""
    return kept._replace(params=drop_replica_dim(kept.params), sums=(*kept.sums, came.arrays))


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
        """The sums of gradients: each replica gets its parts, and all of loss and metrics."""
        size = self.replica.group.size

        def scatter(message: Message, one: Reduction) -> Reduction:
            if message.bucket is None:
                return one
            apply = None if one.apply is None else partial(self._of_whole_leaves, message.bucket, one.apply)
            return one._replace(collective="reduce_scatter", replicas=size, apply=apply)

        return tuple(map(scatter, self.plan.messages, reductions(self.plan, self.replica.options.hook, None)))

    def _of_whole_leaves(
        self, bucket: int, apply: Callable[..., tuple[Array, Any]], comm: Communicator, message: Array, memory: Any
    ) -> tuple[Array, Any]:
        """This replica's part of what a hook makes of a bucket: a hook is given leaves, not parts of them."""
        plan, of_parts = (replace(x, buckets=(x.buckets[bucket],)) for x in (self.plan, self.of_parts))
        (whole,) = pack(plan, unpack_rows(of_parts, plan, comm.size, (message,)))
        total, memory = apply(comm, whole, memory)
        (rows,) = pack_rows(of_parts, comm.size, unpack(plan, (total,)))
        return own_part(rows, comm.size, comm.replica_index()), memory

    def scatters_of(self, micro_batch: str) -> tuple[Reduction, ...]:
        """The same of a micro-batch before the last one, which sends gradients alone."""
        each = zip(self.plan.messages, self.scatters)
        return tuple(
            one._replace(name=f"{micro_batch} {one.name}") for message, one in each if message.bucket is not None
        )

    def gathers(self, order: Sequence[int]) -> tuple[Reduction, ...]:
        """The gathers that bring buckets of parameters to all replicas, in this order."""
        of = {message.bucket: one for message, one in zip(self.plan.messages, self.scatters)}
        return tuple(of[k]._replace(name=f"gather {k}", collective="all_gather", apply=None) for k in order)

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
        """This replica's parts of what is trained, in place of shards and of whole leaves."""
        size = self.replica.group.size
        index = self.replica.group.communicator.replica_index()
        chosen = set(self.replica.chosen(whole_forms(params)))
        leaves = [
            x.parts if is_shard(x) else own_part(x, size, index, depth_of(x.size, x.shape, size)) if i in chosen else x
            for i, x in enumerate(_leaves(params))
        ]
        return self.plan.treedef.unflatten(leaves)

    def updated(self, state: TrainState, messages: Messages, kept: Any) -> tuple[TrainState, StepInfo]:
        """The next state, in shards where this one is and else with this replica's parts of the parameters."""
        mine = state._replace(params=self.own(state.params))
        nothing = jnp.zeros(len(self.plan.messages), jnp.uint32)
        own, broken, sums = kept
        came = partial(self._came, sums)
        mean = self.replica.mean(self.of_parts, came, mine, messages, (own, broken), nothing)
        comm = self.replica.group.communicator
        run = partial(run_on_parts, self.replica, self.update, state, mine, mean)
        (new, info), sent = count_bytes(comm, run)
        return new, info._replace(sent=nothing.at[-1].add(as_uint32(sent)))

    def sent(self, info: StepInfo, of_scatters: Any, of_gathers: Any, order: Sequence[int]) -> StepInfo:
        """Adds the bytes of each bucket, there and back; the last number counts scalars and the update's messages."""
        before, last = jnp.split(of_scatters, [of_scatters.size - len(self.plan.messages)])
        of_buckets = by_bucket(self.plan, last).at[np.array(order, int)].add(of_gathers)
        of_earlier = before.reshape(-1, len(self.plan.buckets)).sum(0, dtype=jnp.uint32)
        return info._replace(sent=of_buckets.at[: of_earlier.size].add(of_earlier) + info.sent)

    def _came(self, sums: Sequence[Sequence[Array]], messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(self.of_parts, messages)
        buckets = reduce(added, (*sums, tuple(buckets)))
        return self.plan.treedef.flatten_up_to(unpack(self.of_parts, buckets)), tail


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)
