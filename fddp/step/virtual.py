"""Steps whose bits do not depend on how many replicas there are: each stands for several virtual ones.

A virtual replica is a fixed slice of the rows with its own key. Each is computed by the same programs on any number of
replicas, and all they contribute (gradients, loss, metrics, weights, buffers) is added in a tree over their numbers.

Source: EasyScale (Li et al., SC 2023).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import BucketPlan, Messages, add_tail, pack, take_tail, unpack
from fddp.comm import Group, block_of, trace
from fddp.schedules import (
    Pieces,
    Runner,
    Schedule,
    VirtualStep,
    after,
    forms_of,
    in_order,
    in_virtual_replicas,
    on_each_device,
    on_threads,
    staged,
)
from fddp.step.replica import Replica
from fddp.step.state import Mean, TrainState

# Gradients that travel, and what travels with them.
Made: TypeAlias = tuple[Sequence[Array], Any]

LAUNCHERS: dict[Schedule, Callable[..., Runner]] = {staged: on_threads, after: in_order}


def virtual_runner(schedule: Schedule, step: VirtualStep, group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Makes the runner of such a step.

    Args:
      schedule: `staged` or `after`.
      step: the step.
      group: the replicas.
      pieces: of a step whose replicas are no virtual ones.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    del pieces
    make = partial(in_virtual_replicas, group.placement, step)
    return LAUNCHERS[schedule](group, make, donate, on_each_device)


def virtual_step(
    replica: Replica, plan: BucketPlan, state: TrainState, rows: Any, use: Callable[[TrainState, Mean], Any]
) -> VirtualStep:
    """Describes such a step.

    Args:
      replica: what one replica does.
      plan: the buckets.
      state: the forms of the state.
      rows: this process's, or their forms.
      use: what is done with averaged gradients.

    Returns:
      The step.
    """
    group, virtual = replica.group, replica.replicas
    each = virtual // group.size
    block = block_of(virtual, each)
    # Those that travel, in one order whatever the buckets are.
    leaves = sorted(i for bucket in plan.buckets for i in bucket.leaves)

    wide = _widened(plan)

    def one(number: Any) -> Replica:
        """What one of so many virtual replicas does, which has a number of its own."""
        comm = replace(group.communicator, size=virtual, replica_index=lambda: number)
        return replace(replica, group=replace(group, communicator=comm))

    def made_of(state: TrainState, rows: Any, number: Array) -> tuple[Made, Any]:
        made: Any
        made, kept = one(number).local(lambda *made: made, state, None, rows)  # type: ignore
        grads = plan.treedef.flatten_up_to(made[0])
        return ([grads[i] for i in leaves], made[1]), kept

    def contribute(state: TrainState, rows: Any, number: Array) -> tuple[Made, Any]:
        made, kept = made_of(state, rows, number)
        return jax.tree.map(lambda x: x.astype(_wide(x.dtype)), made), kept

    def messages(made: Made) -> Messages:
        grads, inside = dict(zip(leaves, made[0])), range(plan.treedef.num_leaves)
        return add_tail(wide, pack(wide, plan.treedef.unflatten([grads.get(i) for i in inside])), made[1])

    share = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) // virtual, *x.shape[1:]), x.dtype), rows)
    given = forms_of(state), share, jax.ShapeDtypeStruct((), np.int32)
    (_, (made, _)), (_, (widened, _)) = (trace(group.placement, f, *given) for f in (made_of, contribute))
    sent = jax.eval_shape(messages, widened)

    def unpacked(sums: Sequence[Array]) -> Made:
        buckets, tail = take_tail(wide, replace(sent, arrays=tuple(sums)))
        grads = plan.treedef.flatten_up_to(unpack(wide, buckets))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), ([grads[i] for i in leaves], tail), made)

    def finish(state: TrainState, came: Made, kept: Sequence[Any], nbytes: Array) -> Any:
        grads = dict(zip(leaves, came[0]))
        back = [grads.get(i) for i in range(plan.treedef.num_leaves)], came[1]
        broken = [own for _, own in kept]
        kept = None, None if broken[0] is None else jnp.any(jnp.stack(broken), axis=0)
        return use(state, one(0).mean(plan, lambda _: back, state, sent, kept, nbytes))

    of_each = group.placement.per_replica
    return VirtualStep(
        each=each,
        block=block,
        first=group.placement.program(lambda: (each * group.communicator.replica_index())[None], (), of_each),
        contribute=contribute,
        pack=lambda made: messages(made).arrays,
        unpack=unpacked,
        reductions=tuple(
            reduction._replace(collective="tree_reduce", blocks=each // block)
            for reduction in replica.reductions(plan, state.params)
        ),
        finish=finish,
    )


def _widened(plan: BucketPlan) -> BucketPlan:
    """The plan of leaves that are added in 32 bits at least: XLA may add in more than 16 within a program, or not."""
    leaves = tuple(replace(leaf, dtype=_wide(leaf.dtype)) for leaf in plan.leaves)
    buckets = tuple(replace(bucket, dtype=_wide(bucket.dtype)) for bucket in plan.buckets)
    return replace(plan, leaves=leaves, buckets=buckets)


def _wide(dtype: Any) -> np.dtype:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32 if narrow else dtype)
