"""Steps whose bits do not depend on the number of replicas: each stands for several virtual ones.

A virtual replica is a fixed slice of the rows with its own key. The same programs compute it on any
number of replicas, and its contributions (gradients, loss, metrics, weights, buffers) are added in
a tree over the numbers of the virtual replicas.

Source: EasyScale (Li et al., SC 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fddp.buckets import (
    BucketPlan,
    Messages,
    add_tail,
    at_least,
    pack,
    scalar_dtype,
    take_tail,
    unpack,
    widened,
)
from fddp.comm import Group, block_of, of_one_replica, trace
from fddp.hooks import Collective
from fddp.losses import Joined
from fddp.reproducible.virtual_list import Tree, in_virtual_replicas
from fddp.schedules import Pieces, Round, Runner, Schedule, after, forms_of, on_each_device
from fddp.step import (
    Agreed,
    Options,
    Replica,
    TrainState,
    Travels,
    Way,
    refuse,
)

# Gradients, and the tail that travels with them.
Contribution: TypeAlias = tuple[Sequence[Array], Any]


def virtual(count: int) -> Way:
    """Makes the way of replicas that stand for `count` virtual ones."""
    return Virtual(name=f"virtual_replicas={count}", schedule=after, replicas=count)


@dataclass(frozen=True, kw_only=True)
class Virtual(Way):
    """Each replica stands for several virtual ones, whose sums are added in a tree."""

    def check_batch(self, replica: Replica, batch: PyTree, rows: int) -> None:
        """Raises ValueError unless virtual replicas have as many rows as in the first batch.

        Also raises it if a rank may be without data, or if the replicas lie in another order than
        their processes.
        """
        if isinstance(batch, Joined):
            refuse(replica.asked | {"fddp.join": "fddp.join"})
        if replica.unit is None:
            check_order(replica)
        elif replica.unit != rows:
            raise ValueError(
                f"a micro-batch of a virtual replica has {rows} rows and had {replica.unit} in "
                "the first batch; a different program, with different rounding, would compute it: "
                "give batches of one size, or create a step per size."
            )

    def travels(self, options: Options, group: Group) -> Travels:
        """A message carries partial sums of the tree, of whole gradients."""
        forms = super().travels(options, group)
        return forms._replace(exact=False, table_rows=False, slices=False, rounds=False)

    def traced(self, replica: Replica) -> Replica:
        """Returns a virtual replica."""
        return one_of(replica, jnp.int32(0))

    def runner(self, schedule: Schedule, replica: Replica, agreed: Agreed) -> Runner:
        """Makes the runner of a step on threads."""
        group = replica.group
        make = partial(in_virtual_replicas, group.placement, *_pieces(replica, agreed))
        if schedule.launch is None:  # `combinations` refuses it
            raise ValueError("virtual_replicas needs schedule='staged' or 'after'.")
        return schedule.launch(group, make, replica.options.donate, on_each_device)


def one_of(replica: Replica, number: Any) -> Replica:
    """Makes a virtual replica: it has a number of its own, and its programs hold no collectives."""
    group = replica.group
    comm = replace(group.communicator, size=replica.replicas, replica_index=lambda: number)
    placement = group.placement._replace(axis_name=None)
    return replace(replica, group=replace(group, communicator=comm, placement=placement))


class _SentLeaves:
    """The gradients that travel, in one order for all plans."""

    def __init__(self, plan: BucketPlan) -> None:
        self._treedef = plan.treedef
        self._numbers = sorted(chain.from_iterable(bucket.leaves for bucket in plan.buckets))
        # XLA may add in more than 16 bits within a program, or not.
        self._wide = widened(plan, np.float32)

    def select(self, tree: PyTree) -> list[Array]:
        """Selects them from a tree like the parameters."""
        leaves = self._treedef.flatten_up_to(tree)
        return [leaves[number] for number in self._numbers]

    def spread(self, grads: Sequence[Array]) -> list[Array | None]:
        """Returns them at their places among all leaves, with None at the others."""
        by_number = dict(zip(self._numbers, grads))
        return list(map(by_number.get, range(self._treedef.num_leaves)))

    def pack(self, contribution: Contribution) -> Messages:
        """Packs them and the tail into messages."""
        grads, tail = contribution
        tree = self._treedef.unflatten(self.spread(grads))
        return add_tail(self._wide, pack(self._wide, tree), tail)

    def unpack(self, messages: Messages) -> Contribution:
        """Unpacks messages: the inverse of `pack`."""
        buckets, tail = take_tail(self._wide, messages)
        return self.select(unpack(self._wide, buckets)), tail


def _pieces(replica: Replica, agreed: Agreed) -> tuple[Pieces, Tree]:
    """The pieces of one virtual replica, and the tree that adds its contributions."""
    plan = agreed.plan
    group = replica.group
    each = replica.replicas // group.size
    block = block_of(replica.replicas, each)
    leaves = _SentLeaves(plan)

    def contribution(state: TrainState, rows: PyTree, number: Array) -> tuple[Contribution, Any]:
        local: Any = one_of(replica, number).local
        outputs, saved = local(lambda *x: x, state, None, rows)
        return (leaves.select(outputs[0]), outputs[1]), saved

    def contribute(state: TrainState, rows: PyTree, number: Array) -> tuple[Contribution, Any]:
        outputs, saved = contribution(state, rows, number)
        return _widened(outputs), saved

    rows = of_one_replica(agreed.rows, replica.replicas // group.processes)
    arguments = forms_of(agreed.state), rows, jax.ShapeDtypeStruct((), np.int32)
    _, (outputs, _) = trace(group.placement, contribution, *arguments)
    packed = jax.eval_shape(lambda outputs: leaves.pack(_widened(outputs)), outputs)

    def unpacked(sums: Sequence[Array]) -> Contribution:
        totals = leaves.unpack(replace(packed, arrays=tuple(sums)))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), totals, outputs)

    def finish(
        state: TrainState, shards: PyTree, sums: Contribution, saved: PyTree, nbytes: Array
    ) -> tuple[Any, Any]:
        received = leaves.spread(sums[0]), sums[1]
        virtual_replica = one_of(replica, 0)
        mean = virtual_replica.mean(plan, lambda _: received, state, packed, saved, nbytes)
        return agreed.use(state, mean), shards

    reductions = tuple(
        reduction._replace(collective=Collective("tree_reduce", blocks=each // block))
        for reduction in replica.reductions(plan)
    )
    # Its outputs are packed only after they are added up.
    run: Any = contribute
    stage = Round("stage", ("state", "rows"), run, reductions, "compute")
    tree = Tree(
        each=each,
        block=block,
        first=lambda: each * _numbers(group),
        pack=lambda outputs: leaves.pack(outputs).arrays,
        unpack=unpacked,
        keep=_saved_of_replica,
    )
    return Pieces((stage,), finish), tree  # type: ignore


def _saved_of_replica(saved: Sequence[Any]) -> Any:
    """Joins the marks of non-finite gradients of a replica's virtual ones."""
    broken = [flags for _, flags in saved]
    if broken[0] is None:
        return None, None
    return None, jnp.any(jnp.stack(broken), axis=0)


def _widened(contribution: Contribution) -> Contribution:
    """Widens gradients to 32 bits, and the tail to the dtype in which its numbers travel."""
    grads, tail = contribution
    least = scalar_dtype(jax.tree.leaves(tail))
    tail = jax.tree.map(lambda x: x.astype(at_least(x.dtype, least)), tail)
    return [x.astype(at_least(x.dtype, np.float32)) for x in grads], tail


def check_order(replica: Replica) -> None:
    """Checks that the replicas of the processes follow each other along the axis, by rank.

    Raises ValueError if they do not: a process would read rows of other virtual replicas.
    """
    group = replica.group
    local = group.size // group.processes
    numbers = [int(x[0]) for x in group.placement.each(_numbers(group))]
    if numbers != list(range(group.rank * local, (group.rank + 1) * local)):
        raise ValueError(
            "virtual_replicas needs the replicas of a process side by side, in order of rank; rank "
            f"{group.rank} has numbers {numbers} along the mesh's axis: order its devices by "
            "process."
        )


def _numbers(group: Group) -> Array:
    """The number of each replica."""
    index = group.communicator.replica_index
    return group.placement.program(lambda: index()[None], (), group.placement.per_replica)()
