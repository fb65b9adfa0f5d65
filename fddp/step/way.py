"""The way in which replicas hold a state and compute a step: a record of functions for the core.

`WHOLE` is the plain way: every replica holds and updates the whole state. The rooms `sharding`,
`local_training` and `reproducible`, which import this one, make the other ways.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import (
    Bucket,
    BucketPlan,
    Messages,
    Shard,
    Slice,
    pack_device_parts,
    unpack_device_parts,
)
from fddp.comm import Group, specs
from fddp.hooks import Hook
from fddp.losses import Pending, Sums
from fddp.schedules import Pieces, Round, Runner, Schedule, fused
from fddp.step.combinations import LOCAL
from fddp.step.state import LocalState, Mean, TrainState
from fddp.step.step_optimizer import Optimizer

if TYPE_CHECKING:  # `Replica` has a field of type `Way`
    from fddp.step.replica import Replica

# (trained parameters, optimizer state, buffers), with None for leaves or buffers that stay whole
Held: TypeAlias = tuple[Any, Any, Any]
# (whole array, index of its leaf among the trained ones) → one replica's shard of it
Cut: TypeAlias = Callable[[Any, int], Shard]
# Whole array → one replica's local copy of it
Copy: TypeAlias = Callable[[Any], Shard]


class Facts(NamedTuple):
    """The facts that the ranks agree on at the first batch."""

    plan: BucketPlan
    state: TrainState
    """Shapes and dtypes of the state that gradients are computed for, with whole arrays."""
    batch: Any
    """This process's rows, or their shapes and dtypes."""
    told: Any
    """Shapes and dtypes of loss and aux."""
    uses: Mapping[tuple[int, Slice | None], int]
    """(leaf, slice) → position of its first use in the forward pass."""
    use: Callable[[TrainState, Mean], Any]
    """(state, mean) → the step's result."""
    read_in: Mapping[int, np.dtype]
    """Leaf → narrower dtype to which the loss casts it on all ranks; other leaves are omitted."""

    def first_use(self, bucket: Bucket) -> int:
        """Finds the position of a bucket's first use in the forward pass."""
        return min(self.uses[i, bucket.slice] for i in bucket.leaves)


class Way(NamedTuple):
    """The way in which replicas hold a state and compute a step of it."""

    name: str
    """The user's option for it; "" for the plain way."""
    more: tuple[str, ...]
    """Further features of that option, by their names in `combinations`."""
    described: str
    """A text about that option, compared on all ranks."""

    check: Callable[["Replica", Any, Any], str]
    """(replica, optimizer, params) → a remark for the user, or ""; raises if the way does not
    support them."""
    check_batch: Callable[["Replica", Any, int], None]
    """(replica, batch, rows of a micro-batch): raises if the way does not support a batch of new
    shapes."""
    hold: Callable[["Replica", Any, Any, Any, Cut, Copy], Held]
    """(replica, trained parameters, optimizer state, buffers, cut, copy) → one replica's share of
    the three trees."""
    seen: Callable[["Replica", TrainState], TrainState]
    """(replica, state) → the state that gradients are computed for; raises if the state belongs to
    another way."""
    gathered: Callable[[Group, TrainState, TrainState], TrainState]
    """(group, state, replicated part) → the replicated part with whole parameters, for `no_sync`.
    Collective."""
    remembers: Callable[["Replica", Hook, Any], Any]
    """(replica, hook, shapes of the trained leaves) → tree of the hook's initial state for each
    leaf."""
    accumulate: Callable[["Replica", TrainState, Any, Pending | None, Any], tuple[Pending, Sums]]
    """(replica, state, shards, pending, rows) → new pending sums, and the means of these rows;
    inside a program."""
    one: Callable[["Replica"], "Replica"]
    """Replica → the replica whose gradients a program computes (a virtual replica, for example)."""
    pieces: Callable[["Replica", Facts], Pieces]
    """(replica, facts) → the pieces of a step."""
    runner: Callable[[Schedule, "Replica", Facts], Runner]
    """(schedule, replica, facts) → the runner of a step."""

    schedule: Schedule
    """The schedule that "auto" picks where none overlaps."""
    replicas: int | None
    """Number of replicas that share the rows; None: the group's size."""
    init: Callable[[Any], Any] | None
    """Trained parameters → optimizer state; None without an optimizer."""
    apart: bool
    """True if part of the state differs between replicas: shards, or local copies."""
    scattered: bool
    """True if buckets are cut into one part per replica."""
    gathers: bool
    """True if the loss's parameters are gathered, in the narrowest dtype that it reads."""
    sums: bool
    """True if messages are plain sums over replicas, so that scalars in a bucket stay exact."""
    table_rows: bool
    """True if gradients are summed, so that a few rows of one may be sent instead."""
    slices: bool
    """True if slices of gradients (some layers of a stack) may be separate messages."""


def whole_pieces(replica: "Replica", facts: Facts) -> Pieces:
    """Makes the pieces of a step with whole states: one round, which sums all gradients."""
    plan = facts.plan
    axes = replica.group.placement.other_axes
    layout = specs(replica.group.placement, facts.state.params)

    def unpack(messages: Messages) -> tuple[list[Any], Any]:
        return unpack_device_parts(axes, plan, messages, layout)

    def backward(
        state: TrainState, pending: Pending | None, rows: PyTree, *nothing: Any
    ) -> tuple[Messages, Any]:
        return replica.local(
            partial(pack_device_parts, axes, plan, where=layout), state, pending, rows
        )

    def finish(
        state: TrainState, shards: PyTree, messages: Messages, saved: PyTree, nbytes: jax.Array
    ) -> tuple[Any, Any]:
        return facts.use(state, replica.mean(plan, unpack, state, messages, saved, nbytes)), shards

    inputs = ("state", "pending", "rows")
    sums = replica.reductions(plan, facts.state.params)
    buckets = {
        message.name: plan.buckets[message.bucket]
        for message in plan.messages
        if message.bucket is not None
    }
    carrier = plan.carrier.name
    first = {name: facts.first_use(bucket) for name, bucket in buckets.items() if name != carrier}
    return Pieces((Round("backward", inputs, backward, sums, "compute"),), finish, uses=first)


def _check(replica: "Replica", optimizer: Optimizer, params: PyTree) -> str:
    del replica, optimizer, params
    return ""


def _check_batch(replica: "Replica", batch: PyTree, rows: int) -> None:
    del replica, batch, rows


def _hold(
    replica: "Replica",
    trained: PyTree,
    opt_state: PyTree,
    model_state: PyTree,
    cut: Cut,
    copy: Copy,
) -> Held:
    del replica, model_state, cut, copy
    return jax.tree.map(lambda x: None, trained), opt_state, None


def _seen(replica: "Replica", state: TrainState) -> TrainState:
    del replica
    if isinstance(state.opt_state, LocalState):
        raise ValueError(
            f"the optimizer's state is LocalState, and this step was made without {LOCAL}: begin "
            "with step.init(fddp.whole(state.params))."
        )
    return state


def _gathered(group: Group, state: TrainState, replicated: TrainState) -> TrainState:
    del group, state
    return replicated


def _remembers(replica: "Replica", hook: Hook, forms: PyTree) -> Any:
    del replica
    return jax.tree.map(hook.init, forms)


def _accumulate(
    replica: "Replica", state: TrainState, shards: PyTree, pending: Pending | None, rows: PyTree
) -> tuple[Pending, Sums]:
    del shards
    return replica.accumulate(state, pending, rows)


def _runner(schedule: Schedule, replica: "Replica", facts: Facts) -> Runner:
    return schedule(replica.group, replica.way.pieces(replica, facts), replica.options.donate)


WHOLE = Way(
    name="",
    more=(),
    described="",
    check=_check,
    check_batch=_check_batch,
    hold=_hold,
    seen=_seen,
    gathered=_gathered,
    remembers=_remembers,
    accumulate=_accumulate,
    one=lambda replica: replica,
    pieces=whole_pieces,
    runner=_runner,
    schedule=fused,
    replicas=None,
    init=None,
    apart=False,
    scattered=False,
    gathers=False,
    sums=True,
    table_rows=True,
    slices=True,
)
"""The plain way. The other ways replace some of its fields."""
