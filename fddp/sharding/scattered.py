"""A step whose replicas share the state: each holds a part of it, and updates that part of the parameters.

A message of gradients is scattered, each replica updates what it got of it, and the new parameters are gathered: the
bytes of an all-reduce. Where only the optimizer's state is shared they are gathered at the step's end; where the
parameters rest in parts, too, at the beginning of the next, in the order in which the forward pass uses them. The
gradients of each micro-batch are scattered under the next one's forward and backward pass, and what adds up is a part.

Source: ZeRO (Rajbhandari et al., SC 2020), stages 1 to 3, of which the second is for micro-batches;
`ZeroRedundancyOptimizer` in `torch.distributed.optim`; PyTorch's FullyShardedDataParallel with `SHARD_GRAD_OP`.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp

from fddp.buckets import Messages, join, take_apart
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.schedules import Pieces, Round
from fddp.sharding.micro_batches import Before, as_the_state_is, by_whole_parameters, micro_batches
from fddp.sharding.own_parts import Parts
from fddp.step import Facts, Replica, TrainState


def gathered_last(replica: Replica, facts: Facts) -> Pieces:
    """The pieces of a step whose parameters are whole between steps: they are gathered as soon as they are updated.

    Args:
      replica: what one replica does.
      facts: of the step.

    Returns:
      The pieces.
    """
    parts = Parts(replica, facts)
    order = range(len(facts.plan.buckets))

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

    rounds = (
        *micro_batches(parts, as_the_state_is, partial(by_whole_parameters, parts)),
        Round("update", ("state", "shards"), update, parts.gathers(order)),
    )
    return Pieces(rounds, unpack, "unpack")


def gathered_first(replica: Replica, facts: Facts) -> Pieces:
    """The pieces of a step whose parameters rest in parts: they are gathered where the forward pass begins to use them.

    Args:
      replica: what one replica does.
      facts: of the step.

    Returns:
      The pieces.
    """
    parts = Parts(replica, facts, facts.read_in)
    first = [facts.first_use(bucket) for bucket in facts.plan.buckets]
    order = sorted(range(len(first)), key=first.__getitem__)

    def packed(state: TrainState, shards: Any, *nothing: Any) -> tuple[Messages, Any]:
        return parts.gathered(parts.own(join(state, shards).params), order), ()

    def begin(state: TrainState, pending: Any, messages: Messages) -> Before:
        return Before(parts.whole(state.params, messages, order), pending)

    def update(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new)
        of_gathers, of_scatters = jnp.split(sent, [len(order)])
        return (equal, parts.sent(info, of_scatters, of_gathers, order)), mine

    rounds = (
        Round("pack", ("state", "shards"), packed, parts.gathers(order)),
        *micro_batches(parts, begin, partial(by_whole_parameters, parts)),
    )
    return Pieces(rounds, update)
