"""A step in which no more than two buckets of parameters are whole at once.

A bucket is gathered shortly before the forward pass reads it, dropped after that, and gathered again for the backward
pass: half as many bytes again as an all-reduce, for the memory of all parameters. A gather stands in the gradients'
program, as a collective of a loss does; that of a layer in the loop that reads it.

Source: ZeRO (Rajbhandari et al., SC 2020), stage 3; `reshard_after_forward` of PyTorch's FSDP2.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import BucketPlan, Messages, join, take_apart, whole_forms
from fddp.comm import MOST, drop_replica_dim
from fddp.hooks import plain_bytes
from fddp.jaxpr import Rows, in_readings, run_in_readings
from fddp.schedules import Pieces, scope
from fddp.sharding.in_slices import Inputs, by_slices
from fddp.sharding.micro_batches import Before, as_the_state_is, micro_batches
from fddp.sharding.own_parts import Kept, Parts
from fddp.step import Facts, Replica, TrainState


def gathered_twice(replica: Replica, facts: Facts) -> Pieces:
    """The pieces of a step whose parameters rest in parts, and are whole only where the loss reads them.

    Args:
      replica: what one replica does.
      facts: of the step.

    Returns:
      The pieces.
    """
    parts = Parts(replica, facts, facts.read_in)
    order = range(len(facts.plan.buckets))

    def update(state: TrainState, shards: Any, messages: Messages, kept: Kept, sent: Any) -> tuple[Any, Any]:
        new, info = parts.updated(join(state, shards), messages, kept)
        equal, mine = take_apart(new)
        once = drop_replica_dim(kept.nbytes)
        times = replica.options.accumulation_steps
        of_gathers = jnp.where(once > np.uint32(MOST // times), np.uint32(MOST), once * np.uint32(times))
        return (equal, parts.sent(info, sent, of_gathers, order)), mine

    return Pieces(tuple(micro_batches(parts, as_the_state_is, partial(_gradients, parts))), update)


def _gradients(parts: Parts, state: TrainState, shards: Any, before: Before, part: Any) -> tuple[Any, Any, Any, Any]:
    """Those of a micro-batch, by parameters that come where they are read."""
    held = join(state, shards).params
    own = parts.own(held)
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole_forms(held))

    def whole(params: Any, state: TrainState, pending: Any, part: Any) -> Any:
        grads, pending, broken = parts.replica.gradients(state._replace(params=params), pending, part, 1)
        return pending, (grads, broken)

    with jax.sharding.use_abstract_mesh(parts.replica.group.placement.view):
        given = state._replace(params=None), before.pending, part
        closed, form = jax.make_jaxpr(whole, return_shape=True)(forms, *given)
    plan = parts.plan
    first = len(jax.tree.leaves(form[0]))  # the forward pass makes what is before the gradients
    grads = [i for i, x in enumerate(plan.treedef.flatten_up_to(form[1][0])) if x is not None]
    sliced = by_slices(plan, closed, dict(enumerate(grads, first)))
    of = {sliced.inputs[i, bucket.slice]: k for k, bucket in enumerate(plan.buckets) for i in bucket.leaves}
    rounds = {k: bucket.rounds for k, bucket in enumerate(plan.buckets) if bucket.rounds > 1}
    program = in_readings(sliced.closed, of, range(first), rounds)
    there = list(zip(plan.treedef.flatten_up_to(own), jax.tree.leaves(forms)))
    # What has no elements does not travel.
    stay = [x if x.size else jnp.zeros(form.shape, form.dtype) for x, form in there]
    weights = [None if k in of else stay[i] for (i, _), k in sliced.inputs.items()]
    rows = {k: _rows(parts, own, sliced.inputs, k) for k in rounds}
    bring = partial(_bring, parts, own, sliced.inputs)
    made = sliced.join(run_in_readings(program, [*weights, *jax.tree.leaves(given)], bring, rows))
    pending, (grads, broken) = jax.tree.unflatten(jax.tree.structure(form), made)
    sent = [min(program.times[k] * nbytes, MOST) for k, nbytes in enumerate(_bytes(parts))]
    return grads, pending, broken, jnp.asarray(sent, jnp.uint32)


def _bring(
    parts: Parts, own: Any, inputs: Inputs, bucket: int, after: Mapping[Any, Any]
) -> tuple[Mapping[int, Any], Any]:
    """Gathers a bucket once some values are there; gives its leaves, and these values."""
    (message,) = parts.gathered(own, [bucket]).arrays
    # The barrier keeps XLA from gathering at once, and from gathering once for both passes.
    message, *held = jax.lax.optimization_barrier((message, *after.values()))
    return _gathered(parts, inputs, bucket, parts.only(bucket), message), dict(zip(after, held))


def _rows(parts: Parts, own: Any, inputs: Inputs, bucket: int) -> Rows:
    """This replica's parts of a bucket, a row for each round, and what gathers such a row."""
    (message,) = parts.gathered(own, [bucket]).arrays
    rows = message.reshape(parts.plan.buckets[bucket].rounds, -1)
    return Rows(rows, partial(_gathered, parts, inputs, bucket, parts.one_round(bucket)))


def _gathered(
    parts: Parts, inputs: Inputs, bucket: int, plans: tuple[BucketPlan, BucketPlan], message: Array
) -> Mapping[int, Any]:
    """Gathers the leaves of a bucket, or a layer of each; gives them by the numbers of inputs."""
    with jax.named_scope(scope(f"gather {bucket}")):
        rows = parts.gathered_here(message)
    one, of_parts = plans
    leaves = parts.unpacked(one, of_parts, (rows,))
    return {inputs[i, one.buckets[0].slice]: leaves[i] for i in one.buckets[0].leaves}


def _bytes(parts: Parts) -> list[int]:
    """The bytes that a replica sends to gather each bucket, all of its devices together."""
    gathers = parts.gathers(range(len(parts.plan.buckets)))
    group = parts.replica.group
    sizes = [(bucket.size * group.placement.devices_of_replica, bucket.dtype) for bucket in parts.of_gathers.buckets]
    return [plain_bytes(group.communicator, one, size, dtype) for one, (size, dtype) in zip(gathers, sizes)]
