"""Steps whose bits do not depend on the number of replicas: each stands for several virtual ones.

A virtual replica is a fixed slice of the rows with its own key. The same programs compute it on any
number of replicas, and its contributions (gradients, loss, metrics, weights, buffers) are added in
a tree over the numbers of the virtual replicas.

Source: EasyScale (Li et al., SC 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fddp.buckets import (
    Messages,
    add_tail,
    at_least,
    pack,
    scalar_dtype,
    take_tail,
    unpack,
    widened,
)
from fddp.comm import as_program, block_of, forms_of, of_one_replica, trace
from fddp.losses import Joined
from fddp.step import Agreed, Replica, Strategy, TrainState, refuse
from fddp.step.schedules import Runner, Schedule
from fddp.training.virtual_runner import Message, one_by_one

# Gradients, with None for leaves that are not sent, and the tail that travels with them.
Contribution: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class VirtualStrategy(Strategy):
    """Each replica stands for several virtual ones, whose sums are added in a tree."""

    # A message carries partial sums of the tree, of whole gradients.
    exact: bool = False
    table_rows: bool = False
    rounds: bool = False

    def check_batch(self, replica: Replica, batch: PyTree, rows: int) -> None:
        """Raises ValueError unless virtual replicas have as many rows as in the first batch.

        Also raises it if a rank may be without data, or if the replicas lie in another order than
        their processes.
        """
        if isinstance(batch, Joined):
            refuse(replica.features | {"fddp.join": "fddp.join"})
        if replica.unit is None:
            check_order(replica)
        elif replica.unit != rows:
            raise ValueError(
                f"a micro-batch of a virtual replica has {rows} rows and had {replica.unit} in "
                "the first batch; a different program, with different rounding, would compute it: "
                "give batches of one size, or create a step per size."
            )

    def gradient_replica(self, replica: Replica) -> Replica:
        """Returns a virtual replica."""
        return one_of(replica, jnp.int32(0))

    def runner(self, schedule: Schedule, replica: Replica, agreed: Agreed) -> Runner:
        """Makes the runner of a step, which has no other schedule."""
        del schedule
        group = replica.group
        each = replica.replicas // group.size
        block = block_of(replica.replicas, each)
        messages, arithmetic = _arithmetic(replica, agreed)
        return one_by_one(group, messages, each, block, replica.options.donate, **arithmetic)


def one_of(replica: Replica, number: Any) -> Replica:
    """Makes a virtual replica: it has a number of its own, and its programs hold no collectives."""
    group = replica.group
    comm = replace(group.communicator, size=replica.replicas, replica_index=lambda: number)
    placement = group.placement._replace(axis_name=None)
    return replace(replica, group=replace(group, communicator=comm, placement=placement))


def _arithmetic(replica: Replica, agreed: Agreed) -> tuple[list[Message], dict[str, Any]]:
    """The messages of a block of virtual replicas, and the functions of one of them."""
    plan = agreed.plan
    # XLA may add in more than 16 bits within a program, or not.
    wide = widened(plan, np.float32)
    sent = {*chain.from_iterable(bucket.leaves for bucket in plan.buckets)}

    def contribution(
        state: TrainState, dealt: tuple[PyTree, Array]
    ) -> tuple[Contribution, Array | None]:
        rows, number = dealt
        local: Any = one_of(replica, number.reshape(())).local
        (grads, tail), (_, marks) = local(lambda *x: x, state, None, rows)
        leaves = enumerate(plan.treedef.flatten_up_to(grads))
        return (plan.treedef.unflatten([x if i in sent else None for i, x in leaves]), tail), marks

    def contribute(
        state: TrainState, dealt: tuple[PyTree, Array]
    ) -> tuple[Contribution, Array | None]:
        outputs, marks = contribution(state, dealt)
        return _widened(outputs), marks

    def packed(contribution: Contribution) -> Messages:
        grads, tail = contribution
        return add_tail(wide, pack(wide, grads), tail)

    placement = one_of(replica, 0).group.placement
    rows = of_one_replica(agreed.common.rows, replica.replicas // replica.group.processes)
    arguments = forms_of(agreed.common.state), (rows, jax.ShapeDtypeStruct((1,), np.int32))
    _, (forms, _) = trace(placement, contribution, *arguments)
    messages = jax.eval_shape(lambda outputs: packed(_widened(outputs)), forms)

    def unpacked(sums: Sequence[Array]) -> Contribution:
        buckets, tail = take_tail(wide, replace(messages, arrays=tuple(sums)))
        totals = unpack(wide, buckets), tail
        return jax.tree.map(lambda x, like: x.astype(like.dtype), totals, forms)

    def finish(
        state: TrainState, sums: Contribution, marks: Array | None, nbytes: Array
    ) -> tuple[Any, Any]:
        received = plan.treedef.flatten_up_to(sums[0]), sums[1]
        of_all = one_of(replica, 0)
        mean = of_all.mean(plan, lambda _: received, state, messages, (None, marks), nbytes)
        return agreed.use(state, mean)

    return list(zip(replica.reductions(plan), messages.arrays)), {
        "contribute": as_program(placement, contribute),
        "pack": lambda contribution: packed(contribution).arrays,
        "unpack": unpacked,
        "finish": as_program(placement, finish),
    }


def _widened(contribution: Contribution) -> Contribution:
    """Widens gradients to 32 bits, and the tail to the dtype in which its numbers travel."""
    grads, tail = contribution
    least = scalar_dtype(jax.tree.leaves(tail))
    widen = lambda tree, least: jax.tree.map(  # noqa: E731
        lambda x: x.astype(at_least(x.dtype, least)), tree
    )
    return widen(grads, np.float32), widen(tail, least)


def check_order(replica: Replica) -> None:
    """Raises ValueError unless processes have consecutive replicas along the axis, by rank.

    Else a process would read rows of other virtual replicas.
    """
    group = replica.group
    local = group.size // group.processes
    index, per_replica = group.communicator.replica_index, group.placement.per_replica
    of_replicas = group.placement.program(lambda: index()[None], (), per_replica)()
    numbers = [int(x[0]) for x in group.placement.per_device(of_replicas)]
    if numbers != list(range(group.rank * local, (group.rank + 1) * local)):
        raise ValueError(
            "virtual_replicas needs the replicas of a process side by side, in order of rank; rank "
            f"{group.rank} has numbers {numbers} along the mesh's axis: order its devices by "
            "process."
        )
