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

from fddp.buckets import Messages, add_tail, at_least, pack, scalar_dtype, take_tail, unpack, widened
from fddp.comm import Group, block_of, of_one_replica, trace
from fddp.losses import Joined
from fddp.reproducible.virtual_list import Tree, in_virtual_replicas
from fddp.schedules import (
    Pieces,
    Round,
    Runner,
    Schedule,
    after,
    forms_of,
    in_order,
    on_each_device,
    on_threads,
    staged,
)
from fddp.step import WHOLE, Facts, Replica, TrainState, Way, check_no_sync, refuse

# Gradients that travel, and what travels with them.
Made: TypeAlias = tuple[Sequence[Array], Any]

LAUNCHERS: dict[Schedule, Callable[..., Runner]] = {staged: on_threads, after: in_order}


def virtual(count: int) -> Way:
    """Makes the way of replicas that stand for virtual ones.

    Args:
      count: the number of virtual replicas.

    Returns:
      The way.
    """
    return WHOLE._replace(
        name=f"virtual_replicas={count}",
        check_batch=_check_slices,
        seen=_seen,
        one=partial(one_of, number=jnp.int32(0)),
        runner=_runner,
        schedule=after,
        replicas=count,
        sums=False,
        table_rows=False,
        slices=False,
    )


def one_of(replica: Replica, number: Any) -> Replica:
    """The part of one virtual replica: it has a number of its own, and nobody to speak to inside of its programs."""
    group = replica.group
    comm = replace(group.communicator, size=replica.replicas, replica_index=lambda: number)
    placement = group.placement._replace(axis_name=None)
    return replace(replica, group=replace(group, communicator=comm, placement=placement))


def _runner(schedule: Schedule, replica: Replica, facts: Facts) -> Runner:
    group = replica.group
    make = partial(in_virtual_replicas, group.placement, *_pieces(replica, facts))
    return LAUNCHERS[schedule](group, make, replica.options.donate, on_each_device)


def _pieces(replica: Replica, facts: Facts) -> tuple[Pieces, Tree]:
    """The pieces of one virtual replica, and the tree in which they are added."""
    plan = facts.plan
    group = replica.group
    each = replica.replicas // group.size
    block = block_of(replica.replicas, each)
    # Those that travel, in one order whatever the buckets are.
    leaves = sorted(i for bucket in plan.buckets for i in bucket.leaves)
    # XLA may add in more than 16 bits within a program, or not.
    wide = widened(plan, np.float32)

    def made_of(state: TrainState, rows: Any, number: Array) -> tuple[Made, Any]:
        made: Any
        made, kept = one_of(replica, number).local(lambda *made: made, state, None, rows)  # type: ignore
        grads = plan.treedef.flatten_up_to(made[0])
        return ([grads[i] for i in leaves], made[1]), kept

    def contribute(state: TrainState, rows: Any, number: Array) -> tuple[Made, Any]:
        made, kept = made_of(state, rows, number)
        return _widened(made), kept

    def messages(made: Made) -> Messages:
        grads = dict(zip(leaves, made[0]))
        inside = range(plan.treedef.num_leaves)
        return add_tail(wide, pack(wide, plan.treedef.unflatten([grads.get(i) for i in inside])), made[1])

    rows = of_one_replica(facts.batch, replica.replicas // group.processes)
    given = forms_of(facts.state), rows, jax.ShapeDtypeStruct((), np.int32)
    _, (made, _) = trace(group.placement, made_of, *given)
    sent = jax.eval_shape(lambda made: messages(_widened(made)), made)

    def unpacked(sums: Sequence[Array]) -> Made:
        buckets, tail = take_tail(wide, replace(sent, arrays=tuple(sums)))
        grads = plan.treedef.flatten_up_to(unpack(wide, buckets))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), ([grads[i] for i in leaves], tail), made)

    def keep(kept: Sequence[Any]) -> Any:
        broken = [own for _, own in kept]
        return None, None if broken[0] is None else jnp.any(jnp.stack(broken), axis=0)

    def finish(state: TrainState, shards: Any, came: Made, kept: Any, nbytes: Array) -> tuple[Any, Any]:
        grads = dict(zip(leaves, came[0]))
        back = [grads.get(i) for i in range(plan.treedef.num_leaves)], came[1]
        mean = one_of(replica, 0).mean(plan, lambda _: back, state, sent, kept, nbytes)
        return facts.use(state, mean), shards

    sums = tuple(
        reduction._replace(collective="tree_reduce", blocks=each // block)
        for reduction in replica.reductions(plan, facts.state.params)
    )
    # What it makes is packed only when it is added up.
    contributes: Any = contribute
    pieces = Pieces((Round("stage", ("state", "rows"), contributes, sums, "compute"),), finish)  # type: ignore
    tree = Tree(
        each=each,
        block=block,
        first=lambda: each * _numbers(group),
        pack=lambda made: messages(made).arrays,
        unpack=unpacked,
        keep=keep,
    )
    return pieces, tree


def _widened(made: Made) -> Made:
    """Gradients as that plan has them; all numbers that are told in one dtype, in which they travel."""
    grads, tail = made
    least = scalar_dtype(jax.tree.leaves(tail))
    tail = jax.tree.map(lambda x: x.astype(at_least(x.dtype, least)), tail)
    return [x.astype(at_least(x.dtype, np.float32)) for x in grads], tail


def _seen(replica: Replica, state: TrainState) -> TrainState:
    if state.accumulated is not None:
        check_no_sync(replica)
    return WHOLE.seen(replica, state)


def _check_slices(replica: Replica, batch: Any, rows: int) -> None:
    """Says that virtual replicas would not be what they were: slices of equally many rows, in each step.

    Args:
      replica: what one replica does.
      batch: what a call was given.
      rows: of a micro-batch of a virtual replica.

    Raises:
      ValueError: a rank may be without data, there are other rows than in the first batch, or replicas lie in another
        order than their processes.
    """
    if isinstance(batch, Joined):
        refuse(replica.asked | {"fddp.join": "fddp.join"})
    if replica.unit is None:
        check_order(replica)
    elif replica.unit != rows:
        raise ValueError(
            f"a micro-batch of a virtual replica has {rows} rows here and had {replica.unit} in the first batch; other "
            "programs would compute it, and round otherwise: give batches of one size, or make a step for each."
        )


def check_order(replica: Replica) -> None:
    """Says that a process has not the virtual replicas whose rows it reads: those behind the ones of the rank before.

    Args:
      replica: what one replica does.

    Raises:
      ValueError: its replicas lie elsewhere along the axis.
    """
    group = replica.group
    here = group.size // group.processes
    found = [int(x[0]) for x in group.placement.each(_numbers(group))]
    if found != list(range(group.rank * here, (group.rank + 1) * here)):
        raise ValueError(
            f"virtual_replicas needs the replicas of a process side by side, in order of rank; rank {group.rank} has "
            f"numbers {found} along the mesh's axis: order its devices by process."
        )


def _numbers(group: Group) -> Array:
    """The number of each replica."""
    index = group.communicator.replica_index
    return group.placement.program(lambda: index()[None], (), group.placement.per_replica)()
