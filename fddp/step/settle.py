"""The first batch settles a step: it is compared on all ranks, its program gives the order of readiness, the order the
plan, the plan the pieces of a schedule. From then on a call is one run.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import BucketPlan, scalar_dtype, take_apart, whole_forms
from fddp.comm import REPLICATED, described, specs, trace, verify
from fddp.jax_internals import ClosedJaxpr, without_jit
from fddp.jaxpr import collectives, first_uses, ready_order, touched_rows
from fddp.losses import Undivided, unjoined
from fddp.optim import LocalState
from fddp.schedules import Runner, Schedule, after, eager, fused, staged
from fddp.step.checks import check_batch, check_memory, check_params, check_paths
from fddp.step.combinations import COLLECTIVES, refuse
from fddp.step.local import own_rows, own_view
from fddp.step.options import name_of
from fddp.step.replica import Replica
from fddp.step.runner import runner_of
from fddp.step.same_rows import digest, digests, tell_same_rows
from fddp.step.shards import check_state, held_form
from fddp.step.state import Mean, TrainState
from fddp.step.virtual import check_order

SCHEDULES: dict[str, Schedule] = {"fused": fused, "after": after, "staged": staged, "eager": eager}

# (replica, where the state's arrays lie, state, mean) -> what a call returns; runs on every replica
Use = Callable[[Replica, TrainState, TrainState, Mean], Any]


class Settled(NamedTuple):
    """A step, once a batch is known."""

    replica: Replica
    """One replica's part of the step; it counts rows in units of the first batch's."""
    plan: BucketPlan
    specs: TrainState
    """A tree like the state: where the parts of each array lie, if a replica is several devices."""
    runner: Runner
    """The step as the schedule runs it."""
    schedule: str
    """The name of the schedule."""
    accumulate: jax.stages.Wrapped
    """The program that adds a batch to what is pending."""
    chosen: tuple[int, ...]
    """The trained leaves."""
    left_out: tuple[int, ...]
    """Trained leaves that no bucket holds, and"""
    forms: frozenset[Any]
    """the forms of batches whose loss is known to have no path to them."""
    held: TrainState
    """The form of what one replica holds of the state, with what is pending once something was."""
    fits: tuple[Any, ...] = ()
    """The forms of state and batch that were checked last: two, for one of no_sync and one of a step come in turns."""
    undivided: bool = False
    """Whether batches are taken as they are."""
    compared: bool = False
    """Whether the ranks' compiled programs are known to send the same."""


class Seen(NamedTuple):
    """The facts that one rank reads off the gradients' program."""

    order: Sequence[int]
    """The trained leaves, as their gradients become ready."""
    uses: Sequence[int]
    """The place in the forward pass at which each leaf is first used."""
    reach: tuple[Sequence[bool], Sequence[int]]
    """Marks of the trained leaves that have a path to the loss, and the number of rows that each gradient touches."""
    schedule: Schedule
    told: Any
    """The forms of loss and aux."""
    digest: bytes
    """Of this rank's first rows."""


def settle(replica: Replica, use: Use, state: TrainState, batch: Any, call: str) -> Settled:
    """Settles a step; every rank calls it with its first batch.

    Args:
      replica: what one replica does.
      use: what is done with averaged gradients.
      state: the first state.
      batch: this process's rows, as programs take them.
      call: what the user called, to be compared.

    Returns:
      The settled step.

    Raises:
      ValueError: the batch does not fit, or ranks differ; on every rank.
      TypeError: the loss returns something else than promised.
    """
    held = state
    state = whole_forms(state)
    if isinstance(state.opt_state, LocalState):
        state = state._replace(opt_state=state.opt_state.inner)  # which a replica goes by
    group = replica.group
    options = replica.options
    chosen = replica.chosen(state.params)
    seen = verify(
        group,
        "batch or loss",
        partial(_look, replica, held, state, batch),
        lambda seen: [f"call {call}", *_described(replica, state, batch, seen)],
    )
    tell_same_rows(group, digests(group, seen.digest))
    order, uses, reach, schedule, told, _ = seen
    # A program may differ between ranks (a branch in Python): rank 0's order holds for all, as in DDP. What has no
    # path to the loss on any rank does not travel.
    order, uses = group.broadcast((np.asarray(order, np.int32), np.asarray(uses, np.int32)))
    paths, touched = group.all_reduce(np.asarray(reach, np.int32), op="max")
    reached = {i for i, path in zip(chosen, paths) if path}
    # Where each step skips what it does not use, a later batch may use what this one has no path to.
    # Where each replica updates a part, all that is trained comes back from the others.
    all_travel = options.skip_all_reduce_unused_params or replica.apart
    later = [i for i in order if i not in reached] if all_travel else []
    order = [*(i for i in order if i in reached), *later]
    where = specs(group.placement, state._replace(accumulated=None, hook_state=()))
    averaged = state.model_state if options.broadcast_buffers == "mean" else None
    dtype = scalar_dtype(jax.tree.leaves((told, averaged)))
    few = {i: options.accumulation_steps * int(count) for i, count in zip(chosen, touched)}
    plan = replica.plan(state.params, order, dtype=dtype, early=schedule not in (fused, after), touched=few)
    replica = replace(replica, unit=np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches)

    used = partial(use, replica, where)
    own = group.placement.per_replica
    specs_of_sums = (REPLICATED, own, own, own), (own, REPLICATED)
    donated = (2,) if options.donate else ()
    return Settled(
        replica=replica,
        plan=plan,
        specs=where,
        runner=runner_of(schedule, replica, plan, state, batch, told, uses, used),
        schedule=name_of(schedule),
        accumulate=group.placement.program(partial(_accumulate, replica), *specs_of_sums, donate=donated),
        chosen=chosen,
        left_out=tuple(i for i in chosen if i not in order),
        forms=frozenset({_form(batch)}),
        held=held_form(group.placement, held),
        undivided=isinstance(unjoined(batch), Undivided),
    )


def _look(replica: Replica, held: TrainState, state: TrainState, batch: Any) -> Seen:
    """Checks the state and the first batch, and reads the gradients' program."""
    check_batch(replica, state, batch)
    if replica.options.virtual_replicas:
        check_order(replica)
    check_memory(replica, state)
    check_state(replica, held)
    chosen = replica.chosen(state.params)
    program, told = _gradients(replica, state, batch)
    order = chosen[::-1] if replica.options.order == "reverse" else _ready(program, chosen)
    # The state comes first: the number of the step, then the parameters.
    uses = first_uses(program)[1:][: len(jax.tree.leaves(state.params))]
    touched = [min(count, np.iinfo(np.int32).max) for count in touched_rows(program)[: len(chosen)]]
    schedule = _schedule(replica, program)
    mine = digest(unjoined(batch)) if replica.group.processes > 1 else b""
    return Seen(order, uses, (_paths(replica, state, batch), touched), schedule, told, mine)


def _described(replica: Replica, state: TrainState, batch: Any, seen: Seen) -> list[str]:
    """Lines that must be equal on all ranks."""
    return [
        repr(replica.options),
        f"schedule {name_of(seen.schedule)}",
        f"plan {replica.provisional_plan(state.params).digest}",
        *replica.described_groups(state.params),
        f"group.local {replica.group.local}",
        *described("batch", batch),
        *described("parameter", state.params),
        *described("model_state", state.model_state),
        *described("rng", state.rng),
        *described("loss and aux", seen.told),
    ]


def _accumulate(replica: Replica, state: TrainState, shards: Any, pending: Any, rows: Any) -> Any:
    if not replica.local_steps:
        return replica.accumulate(state, pending, rows)
    return replica.accumulate(own_view(state, shards), pending, own_rows(rows))


def admit(settled: Settled, tree: Any, state: TrainState, batch: Any) -> Settled:
    """Checks what a call was given, on this rank alone.

    A batch of another form may have another program, with paths that the first one had not.

    Args:
      settled: the step.
      tree: the structure of
      state: the state.
      batch: this process's rows.

    Returns:
      The step, which knows this form of a batch.

    Raises:
      ValueError: the parameters or the batch do not fit.
    """
    form = _form(batch)
    own = jax.tree.leaves(state.accumulated)[:1] + (take_apart(state)[1] if settled.replica.apart else [])
    fits = tree, [len(x) for x in own], form
    if fits in settled.fits:
        return settled
    check_state(settled.replica, state)
    held = settled.held
    if held.accumulated is None and state.accumulated is not None:
        held = held_form(settled.replica.group.placement, state)
    state = whole_forms(state)
    check_params(settled.plan, state.params)
    check_batch(settled.replica, state, batch)
    settled = settled._replace(fits=(fits, *settled.fits)[:2], held=held)
    if not settled.left_out or form in settled.forms:
        return settled
    paths = dict(zip(settled.chosen, _paths(settled.replica, state, batch)))
    check_paths(settled.plan, [i for i in settled.left_out if paths[i]])
    return settled._replace(forms=settled.forms | {form})


def _ready(program: ClosedJaxpr, chosen: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(chosen[k] for k in ready_order(program, len(chosen)))


def _gradients(replica: Replica, state: TrainState, batch: Any) -> tuple[ClosedJaxpr, Any]:
    """The gradients of one micro-batch of one replica as a program, and the form of loss and aux."""

    virtual = replica.options.virtual_replicas
    placement = replica.group.placement
    own = replica.virtual(jnp.int32(0)) if virtual else replica

    def program(state: TrainState, batch: Any) -> tuple[Any, Any]:
        sums = own.one(state, _part(replica, batch))
        return sums.grads, (sums.loss, sums.aux)

    try:
        closed, (_, told) = trace(placement._replace(axis_name=None) if virtual else placement, program, state, batch)
        return closed, told
    except NameError as error:
        unbound = re.search(r"unbound axis name: ([^.\s]+)", str(error))
        if unbound is None:
            raise
    # Not in there: JAX's own words would be shown above these.
    if virtual:
        refuse(replica.asked | {COLLECTIVES: f"a loss that speaks over the axis {unbound[1]!r}"})
    axis = replica.group.axis_name
    there = f"the axis {axis!r}" if axis else "no mesh axis; use backend 'gloo' or 'nccl'"
    raise ValueError(
        f"the loss has a collective over the axis {unbound[1]!r}; backend {replica.group.backend!r} has {there}."
    )


def _paths(replica: Replica, state: TrainState, batch: Any) -> tuple[bool, ...]:
    """Marks the trained leaves that have a path to the loss."""
    found: list[tuple[bool, ...]] = []

    def program(state: TrainState, batch: Any) -> None:
        found.append(replica.paths(state, _part(replica, batch)))

    trace(replica.group.placement, program, state, batch)
    return found[0]


def _part(replica: Replica, batch: Any) -> Any:
    """The rows of one micro-batch."""
    return jax.tree.map(lambda x: x[: x.shape[0] // replica.micro_batches], batch)


def _schedule(replica: Replica, program: ClosedJaxpr) -> Schedule:
    """The schedule that was asked for, or the one that overlaps here."""
    group = replica.group
    asked = replica.options.schedule
    own = collectives(program)
    axes = group.placement.other_axes
    if own:
        refuse(replica.asked | {COLLECTIVES: f"collectives in the loss ({', '.join(sorted(own))})"})
    if callable(asked):
        return asked
    if asked != "auto":
        return SCHEDULES[asked]
    cpu_hosts = group.processes > 1 and group.size == group.processes and jax.default_backend() == "cpu"
    in_one = after if replica.options.virtual_replicas else fused
    return staged if cpu_hosts and not (own or axes or without_jit()) else in_one


def _form(batch: Any) -> Any:
    """Structure, shapes and dtypes: what a program is traced for."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
