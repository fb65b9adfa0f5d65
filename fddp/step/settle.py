"""The first batch settles a step: it is compared on all ranks, its program gives the order of readiness, the order the
plan, the plan the pieces of a schedule. From then on a call is one run.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fddp.buckets import BucketPlan, Slice, Travelling, scalar_dtype, take_apart, whole_forms
from fddp.comm import REPLICATED, Placement, as_program, specs, verify_beside
from fddp.losses import Undivided, unjoined
from fddp.schedules import Runner, forms_of
from fddp.step.checks import check_batch, check_casts, check_params, check_paths, params_checked
from fddp.step.first_batch import Seen, casts, described_batch, look, paths
from fddp.step.held import check_cuts, check_held, held_form
from fddp.step.options import name_of
from fddp.step.replica import Replica
from fddp.step.same_rows import tell_same_rows
from fddp.step.state import Mean, TrainState
from fddp.step.way import Facts

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
    """Trained leaves that no bucket holds."""
    forms: frozenset[Any]
    """The forms of batches whose loss is known to have no path to these leaves."""
    params: Any
    """The forms of the parameters."""
    held: TrainState
    """The form of what one replica holds of the state, with what is pending once something was."""
    fits: tuple[Any, ...] = ()
    """The forms of state and batch that were checked last: four, as calls of no_sync and steps may come in turns, with
    arrays and with promises."""
    undivided: bool = False
    """Whether batches are taken as they are."""
    read_in: Mapping[int, np.dtype] = MappingProxyType({})
    """The dtype in which a leaf is gathered, where that is not its own: the one in which the first batch's loss reads
    it."""
    compared: bool = False
    """Whether the ranks' compiled programs are known to send the same."""
    first: tuple[Any, ...] = ()
    """The forms of the first step's arguments; () before that."""

    @property
    def is_one_program(self) -> bool:
        """Whether XLA launches the buckets (schedule "fused")."""
        return self.runner.timeline is None


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
    group = replica.group
    describe = partial(described_batch, replica, batch, call)
    find = partial(look, replica, state, batch)
    seen, digests = verify_beside(group, "batch or loss", find, describe, attrgetter("digest"))
    tell_same_rows(group, digests)
    agreed = _agreed(replica, seen)
    plan = _plan(replica, seen, agreed)
    forms = forms_of(seen.state.params)
    unit = np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches
    objective = params_checked(replica, forms, replica.objective)
    replica = replace(replica, unit=unit, objective=objective)
    where = specs(group.placement, seen.state._replace(accumulated=None, hook_state=()))
    use_mean = params_checked(replica, forms, partial(use, replica, where))
    facts = Facts(plan, seen.state, batch, seen.told, agreed.uses, use_mean, agreed.read_in)
    return Settled(
        replica=replica,
        plan=plan,
        specs=where,
        runner=replica.way.runner(seen.schedule, replica, facts),
        schedule=name_of(seen.schedule),
        accumulate=_accumulating(group.placement, replica),
        chosen=seen.chosen,
        left_out=tuple(i for i in seen.chosen if i not in {one.leaf for one in agreed.order}),
        forms=frozenset({_form(batch)}),
        read_in=agreed.read_in if replica.way.gathers else {},
        params=forms,
        held=held_form(group.placement, state),
        fits=(_fit(replica, jax.tree.structure(state), state, batch),),
        undivided=isinstance(unjoined(batch), Undivided),
    )


class Agreed(NamedTuple):
    """The same facts, alike on all ranks."""

    order: list[Travelling]
    """The leaves, or slices of them, that travel, as their gradients become ready."""
    uses: Mapping[tuple[int, Slice | None], int]
    """The place in the forward pass at which each leaf, or slice of one, is first used."""
    touched: dict[int, int]
    """The number of rows that a replica's gradient of a leaf touches."""
    read_in: Mapping[int, np.dtype]
    """The dtype of fewer bits in which the loss reads a leaf, for each leaf that it reads so."""


def _agreed(replica: Replica, seen: Seen) -> Agreed:
    """Makes one of what the ranks have seen; all of them take part."""
    group = replica.group
    options = replica.options
    # A program may differ between ranks (a branch in Python): rank 0's order holds for all, as in DDP. What has no
    # path to the loss on any rank does not travel.
    order, uses, program, read_in = group.broadcast_object((seen.order, seen.uses, seen.program, seen.read_in))
    # A sum in a loop has no place among the others that ranks with different programs could agree on.
    if program and group.all_reduce(np.int32(seen.program != program), op="max"):
        order = [one._replace(rounds=1) for one in order]
    other = [seen.read_in.get(i) != read_in.get(i) for i in seen.chosen]
    has_path, touched, differs = group.all_reduce(np.asarray([*seen.reach, other], np.int32), op="max")
    reached = {i for i, path in zip(seen.chosen, has_path) if path}
    # Where each step skips what it does not use, a later batch may use what this one has no path to.
    # Where each replica updates a part, all that is trained comes back from the others.
    all_travel = options.skip_all_reduce_unused_params or replica.way.apart
    later = [one for one in order if one.leaf not in reached] if all_travel else []
    rows = {i: options.accumulation_steps * int(count) for i, count in zip(seen.chosen, touched)}
    alike = {i for i, one in zip(seen.chosen, differs) if not one}
    read_in = {i: dtype for i, dtype in read_in.items() if i in alike}
    return Agreed([*(one for one in order if one.leaf in reached), *later], uses, rows, read_in)


def _plan(replica: Replica, seen: Seen, agreed: Agreed) -> BucketPlan:
    averaged = seen.state.model_state if replica.options.broadcast_buffers == "mean" else None
    plan = replica.plan(
        seen.state.params,
        agreed.order,
        dtype=scalar_dtype(jax.tree.leaves((seen.told, averaged))),
        touched=agreed.touched,
    )
    return replace(plan, collectives=seen.collectives)


def _accumulating(placement: Placement, replica: Replica) -> jax.stages.Wrapped:
    own = placement.per_replica
    given = (REPLICATED, own, own, own)
    donated = (2,) if replica.options.donate else ()
    run = as_program(placement, partial(replica.way.accumulate, replica))
    return placement.program(run, given, (own, REPLICATED), donate=donated)


def admit(settled: Settled, tree: Any, state: TrainState, batch: Any) -> Settled:
    """Checks what a call was given, on this rank alone.

    A batch of another form may have another program, with paths that the first one had not.

    Args:
      settled: the step.
      tree: the structure of the state.
      state: what a call was given.
      batch: this process's rows.

    Returns:
      The step, which knows this form of a batch.

    Raises:
      ValueError: the parameters or the batch do not fit.
    """
    replica = settled.replica
    fits = _fit(replica, tree, state, batch)
    if fits in settled.fits:
        return settled
    check_params(replica, settled.params, whole_forms(state.params))
    seen = check_held(replica, state)
    if replica.group.placement.other_axes:
        check_cuts(state, settled.specs)
    check_batch(replica, batch)
    held = settled.held
    if held.accumulated is None and state.accumulated is not None:
        held = held_form(replica.group.placement, state)
    settled = settled._replace(fits=(fits, *settled.fits)[:4], held=held)
    form = _form(batch)
    if form in settled.forms:
        return settled
    if settled.left_out:
        has_path = dict(zip(settled.chosen, paths(replica, seen, batch)))
        check_paths(settled.plan, [i for i in settled.left_out if has_path[i]])
    if settled.read_in:
        check_casts(settled.plan, settled.read_in, casts(replica, seen, batch))
    return settled._replace(forms=settled.forms | {form})


def _fit(replica: Replica, tree: Any, state: TrainState, batch: Any) -> Any:
    """Facts that are alike for calls that need no other check."""
    own = jax.tree.leaves(state.accumulated)[:1] + (take_apart(state)[1] if replica.way.apart else [])
    who = [getattr(x, "sharding", None) for x in own[-1:]]  # a mesh; ranks are in the tree
    return tree, [x.shape for x in own], who, _form(batch)


def _form(batch: Any) -> Any:
    """Structure, shapes and dtypes: what a program is traced for."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
