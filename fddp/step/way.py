"""The way in which replicas hold a state and make a step of it: a record that the core is given.

`WHOLE` is the plain one: every replica holds all of the state and updates all of it. The others stand in rooms of their
own, which import this one: `sharding`, `local_training`, `reproducible`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np

from fddp.buckets import Bucket, BucketPlan, Messages, Shard, Slice, pack_device_parts, unpack_device_parts
from fddp.comm import Group, specs
from fddp.hooks import Hook
from fddp.losses import Pending, Sums
from fddp.optim import LocalState, Optimizer
from fddp.schedules import Pieces, Round, Runner, Schedule, fused
from fddp.step.combinations import LOCAL
from fddp.step.state import Mean, TrainState

if TYPE_CHECKING:  # a replica knows its way
    from fddp.step.replica import Replica

# The parameters that are trained, None for those that stay as they are; the optimizer's state; the buffers, None where
# they stay.
Held: TypeAlias = tuple[Any, Any, Any]
# (a whole array, the number among those trained of the leaf that it belongs to) → what one replica holds of it.
Cut: TypeAlias = Callable[[Any, int], Shard]
# A whole array → the copy of it that one replica holds.
Copy: TypeAlias = Callable[[Any], Shard]


class Facts(NamedTuple):
    """The facts of a step that are known once the first batch is compared."""

    plan: BucketPlan
    state: TrainState
    """The forms of the state, as gradients go by it."""
    batch: Any
    """This process's rows, or their forms."""
    told: Any
    """The forms of loss and aux."""
    uses: Mapping[tuple[int, Slice | None], int]
    """The place in the forward pass at which each leaf, or slice of one, is first used."""
    use: Callable[[TrainState, Mean], Any]
    """Makes the step's result of averaged gradients."""
    read_in: Mapping[int, np.dtype]
    """The dtype of fewer bits in which the loss reads a leaf on all ranks, for each leaf that it reads so."""

    def first_use(self, bucket: Bucket) -> int:
        """The place in the forward pass at which something in a bucket is first used."""
        return min(self.uses[i, bucket.slice] for i in bucket.leaves)


class Way(NamedTuple):
    """Replicas' way to hold a state and to make a step of it."""

    name: str
    """The words with which the user asked for it; "" for the plain way."""
    more: tuple[str, ...]
    """Further features of what the user asked for, by their names in `combinations`."""
    described: str
    """More of what the user asked for, to be compared on all ranks."""

    check: Callable[["Replica", Any, Any], str]
    """(replica, optimizer, params): refuses what cannot be held or done so, before a state exists; returns a remark for
    the user, or ""."""
    check_batch: Callable[["Replica", Any, int], None]
    """(replica, batch, rows of a micro-batch): refuses a batch of a new form."""
    hold: Callable[["Replica", Any, Any, Any, Cut, Copy], Held]
    """(replica, trained parameters, optimizer's state, buffers, cut, copy) → what a replica holds of them."""
    seen: Callable[["Replica", TrainState], TrainState]
    """(replica, state) → the state as gradients go by it; refuses one of another way."""
    gathered: Callable[[Group, TrainState, TrainState], TrainState]
    """(group, state, what of it is equal on all replicas) → the latter, with the parameters that `no_sync` computes
    with; every rank calls it."""
    remembers: Callable[["Replica", Hook, Any], Any]
    """(replica, hook, forms of trained leaves) → a tree like these, with the hook's first memory in place of a leaf."""
    accumulate: Callable[["Replica", TrainState, Any, Pending | None, Any], tuple[Pending, Sums]]
    """(replica, state, shards, pending, rows) → everything pending, and these rows' own means; inside a program."""
    one: Callable[["Replica"], "Replica"]
    """The replica whose gradients a program computes."""
    pieces: Callable[["Replica", Facts], Pieces]
    """(replica, facts) → the pieces of a step."""
    runner: Callable[[Schedule, "Replica", Facts], Runner]
    """(schedule, replica, facts) → what runs a step."""

    schedule: Schedule
    """The schedule where nothing overlaps."""
    replicas: int | None
    """The number of replicas among which rows are divided; None: as many as the group has."""
    init: Callable[[Any], Any] | None
    """Makes the optimizer's state for the trained parameters; None: there is no optimizer."""
    apart: bool
    """Whether each replica holds something of the state for itself."""
    scattered: bool
    """Whether buckets are cut into a part for each replica."""
    gathers: bool
    """Whether the parameters that a loss reads are gathered for it, in as few bits as it reads of them."""
    sums: bool
    """Whether messages are plain sums over replicas, in which scalars ride exactly."""
    table_rows: bool
    """Whether these are sums of gradients, of which a few rows may travel alone."""
    slices: bool
    """Whether slices of gradients, some layers of a stack, may travel as messages of their own."""


def whole_pieces(replica: "Replica", facts: Facts) -> Pieces:
    """The pieces of a step that every replica does as a whole.

    Args:
      replica: one of them.
      facts: of the step.

    Returns:
      The pieces: one round, of all gradients.
    """
    plan = facts.plan
    axes = replica.group.placement.other_axes
    where = specs(replica.group.placement, facts.state.params)

    def unpack(messages: Messages) -> tuple[list[Any], Any]:
        return unpack_device_parts(axes, plan, messages, where)

    def backward(state: TrainState, pending: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
        return replica.local(partial(pack_device_parts, axes, plan, where=where), state, pending, rows)

    def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
        return facts.use(state, replica.mean(plan, unpack, state, messages, kept, sent)), shards

    given = ("state", "pending", "rows")
    sums = replica.reductions(plan, facts.state.params)
    buckets = {one.name: plan.buckets[one.bucket] for one in plan.messages if one.bucket is not None}
    carrier = plan.carrier.name
    first = {name: facts.first_use(bucket) for name, bucket in buckets.items() if name != carrier}
    return Pieces((Round("backward", given, backward, sums, "compute"),), finish, uses=first)


def _check(replica: "Replica", optimizer: Optimizer, params: Any) -> str:
    del replica, optimizer, params
    return ""


def _check_batch(replica: "Replica", batch: Any, rows: int) -> None:
    del replica, batch, rows


def _hold(replica: "Replica", trained: Any, opt_state: Any, model_state: Any, cut: Cut, copy: Copy) -> Held:
    del replica, model_state, cut, copy
    return jax.tree.map(lambda x: None, trained), opt_state, None


def _seen(replica: "Replica", state: TrainState) -> TrainState:
    del replica
    if isinstance(state.opt_state, LocalState):
        raise ValueError(
            f"the optimizer's state is LocalState, and this step was made without {LOCAL}: begin with "
            "step.init(fddp.whole(state.params))."
        )
    return state


def _gathered(group: Group, state: TrainState, replicated: TrainState) -> TrainState:
    del group, state
    return replicated


def _remembers(replica: "Replica", hook: Hook, forms: Any) -> Any:
    del replica
    return jax.tree.map(hook.init, forms)


def _accumulate(
    replica: "Replica", state: TrainState, shards: Any, pending: Pending | None, rows: Any
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
"""Every replica holds all of the state and updates all of it; other ways are made of this one, with some fields new."""
