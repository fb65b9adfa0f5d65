"""Settles a step with its first batch, and checks later batches.

The ranks compare their batches. The gradients' program gives the ready order, the order gives the
bucket plan, and the plan gives the pieces for a schedule. Later calls only run the step.

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
from jaxtyping import PyTree

from fddp.buckets import BucketPlan, Slice, Travelling, scalar_dtype, take_apart, whole_forms
from fddp.comm import REPLICATED, Placement, as_program, specs, verify_beside
from fddp.losses import Undivided, unjoined
from fddp.schedules import Runner, StepInputs, forms_of
from fddp.step.checks import check_batch, check_casts, check_params, check_paths, params_checked
from fddp.step.first_batch import Seen, casts, described_batch, look, paths
from fddp.step.held import check_cuts, check_held, held_form
from fddp.step.replica import Replica
from fddp.step.same_rows import tell_same_rows
from fddp.step.state import Mean, TrainState
from fddp.step.way import Facts

# (replica, layout of the state, state, mean) → result of a call; runs on every replica
Use = Callable[[Replica, TrainState, TrainState, Mean], Any]


class Settled(NamedTuple):
    """A step after its first batch."""

    replica: Replica
    """One replica's part of the step, with the first batch's rows as unit of weight."""
    plan: BucketPlan
    specs: TrainState
    """Layout of the state: a tree of `PartitionSpec`s."""
    runner: Runner
    """The step as the schedule runs it."""
    schedule: str
    """Name of the schedule."""
    accumulate: jax.stages.Wrapped
    """The program of `no_sync`."""
    chosen: tuple[int, ...]
    """Indices of the trained leaves."""
    left_out: tuple[int, ...]
    """Trained leaves outside all buckets."""
    forms: frozenset[Any]
    """Forms of batches checked so far: none reaches a leaf of `left_out`."""
    params: Any
    """Shapes and dtypes of the parameters."""
    held: TrainState
    """Shapes and dtypes of one replica's share of the state, with pending sums from the first
    `no_sync` on."""
    fits: tuple[Any, ...] = ()
    """The last four checked forms of (state, batch). Four: steps and `no_sync` may alternate, each
    with arrays or promises."""
    undivided: bool = False
    """True if batches are not divided into rows: each micro-batch takes one whole batch."""
    read_in: Mapping[int, np.dtype] = MappingProxyType({})
    """Leaf → narrower dtype in which it is gathered, as the first batch's loss reads it."""
    compared: bool = False
    """True once the ranks have compared the collectives of their compiled programs."""
    first: StepInputs | None = None
    """Shapes and dtypes of the first step's inputs; None before that step."""

    @property
    def is_one_program(self) -> bool:
        """True if XLA launches the buckets (schedule "fused")."""
        return self.runner.timeline is None


def settle(replica: Replica, use: Use, state: TrainState, batch: PyTree, call: str) -> Settled:
    """Settles a step with this rank's first batch. Collective; an error is raised on every rank."""
    group = replica.group
    describe = partial(described_batch, replica, batch, call)
    find = partial(look, replica, state, batch)
    findings, digests = verify_beside(group, "batch or loss", find, describe, attrgetter("digest"))
    tell_same_rows(group, digests)
    agreed = _agreed(replica, findings)
    plan = _plan(replica, findings, agreed)
    forms = forms_of(findings.state.params)
    unit = np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches
    objective = params_checked(replica, forms, replica.objective)
    replica = replace(replica, unit=unit, objective=objective)
    layout = specs(group.placement, findings.state._replace(accumulated=None, hook_state=()))
    use_mean = params_checked(replica, forms, partial(use, replica, layout))
    facts = Facts(plan, findings.state, batch, findings.told, agreed.uses, use_mean, agreed.read_in)
    return Settled(
        replica=replica,
        plan=plan,
        specs=layout,
        runner=replica.way.runner(findings.schedule, replica, facts),
        schedule=findings.schedule.name,
        accumulate=_accumulating(group.placement, replica),
        chosen=findings.chosen,
        left_out=tuple(i for i in findings.chosen if i not in {unit.leaf for unit in agreed.order}),
        forms=frozenset({_form(batch)}),
        read_in=agreed.read_in if replica.way.gathers else {},
        params=forms,
        held=held_form(group.placement, state),
        fits=(_fit(replica, jax.tree.structure(state), state, batch),),
        undivided=isinstance(unjoined(batch), Undivided),
    )


class Agreed(NamedTuple):
    """Facts that are equal on all ranks."""

    order: list[Travelling]
    """The leaves, or slices of them, to send, in ready order."""
    uses: Mapping[tuple[int, Slice | None], int]
    """(leaf, slice) → position of its first use in the forward pass."""
    touched: dict[int, int]
    """Leaf → number of non-zero rows of a replica's gradient."""
    read_in: Mapping[int, np.dtype]
    """Leaf → narrower dtype to which the loss casts it; other leaves are omitted."""


def _agreed(replica: Replica, findings: Seen) -> Agreed:
    """Merges the findings of all ranks. Collective."""
    group = replica.group
    options = replica.options
    # Programs may differ between ranks (a branch in Python). Then rank 0's order is used, as in
    # DDP. A leaf without a path to the loss on any rank is not sent.
    order, uses, program, read_in = group.broadcast_object(
        (findings.order, findings.uses, findings.program, findings.read_in)
    )
    # Ranks with different programs cannot agree on the order of a loop's sums and other messages.
    if program and group.all_reduce(np.int32(findings.program != program), op="max"):
        order = [unit._replace(rounds=1) for unit in order]
    casts_differ = [findings.read_in.get(i) != read_in.get(i) for i in findings.chosen]
    has_path, touched, differs = group.all_reduce(
        np.asarray([*findings.reach, casts_differ], np.int32), op="max"
    )
    reached = {i for i, path in zip(findings.chosen, has_path) if path}
    # All leaves are sent if each step skips its unused ones, since a later batch may use more
    # leaves, and if replicas update shards, since every trained leaf is gathered.
    send_all = options.skip_all_reduce_unused_params or replica.way.apart
    later = [unit for unit in order if unit.leaf not in reached] if send_all else []
    rows = {
        i: options.accumulation_steps * int(count) for i, count in zip(findings.chosen, touched)
    }
    equal = {i for i, differing in zip(findings.chosen, differs) if not differing}
    read_in = {i: dtype for i, dtype in read_in.items() if i in equal}
    return Agreed([*(unit for unit in order if unit.leaf in reached), *later], uses, rows, read_in)


def _plan(replica: Replica, findings: Seen, agreed: Agreed) -> BucketPlan:
    averaged = findings.state.model_state if replica.options.broadcast_buffers == "mean" else None
    plan = replica.plan(
        findings.state.params,
        agreed.order,
        dtype=scalar_dtype(jax.tree.leaves((findings.told, averaged))),
        touched=agreed.touched,
    )
    return replace(plan, collectives=findings.collectives)


def _accumulating(placement: Placement, replica: Replica) -> jax.stages.Wrapped:
    """Makes the program of `no_sync`."""
    per_replica = placement.per_replica
    in_specs = (REPLICATED, per_replica, per_replica, per_replica)
    donated = (2,) if replica.options.donate else ()
    run = as_program(placement, partial(replica.way.accumulate, replica))
    return placement.program(run, in_specs, (per_replica, REPLICATED), donate=donated)


def admit(settled: Settled, tree: PyTree, state: TrainState, batch: PyTree) -> Settled:
    """Checks the arguments of a call, on this rank only, and records their form as checked.

    A batch of another form may have another program, and reach leaves outside the plan.
    """
    replica = settled.replica
    fits = _fit(replica, tree, state, batch)
    if fits in settled.fits:
        return settled
    check_params(replica, settled.params, whole_forms(state.params))
    gradient_state = check_held(replica, state)
    if replica.group.placement.other_axes:
        check_cuts(state, settled.specs)
    check_batch(replica, batch)
    share = settled.held
    if share.accumulated is None and state.accumulated is not None:
        share = held_form(replica.group.placement, state)
    settled = settled._replace(fits=(fits, *settled.fits)[:4], held=share)
    form = _form(batch)
    if form in settled.forms:
        return settled
    if settled.left_out:
        has_path = dict(zip(settled.chosen, paths(replica, gradient_state, batch)))
        check_paths(settled.plan, [i for i in settled.left_out if has_path[i]])
    if settled.read_in:
        check_casts(settled.plan, settled.read_in, casts(replica, gradient_state, batch))
    return settled._replace(forms=settled.forms | {form})


def _fit(replica: Replica, tree: PyTree, state: TrainState, batch: PyTree) -> Any:
    """Returns a key of (state, batch): calls with equal keys need only one check."""
    local = jax.tree.leaves(state.accumulated)[:1] + (
        take_apart(state)[1] if replica.way.apart else []
    )
    shardings = [getattr(x, "sharding", None) for x in local[-1:]]  # ranks are in the tree
    return tree, [x.shape for x in local], shardings, _form(batch)


def _form(batch: PyTree) -> Any:
    """Returns the structure, shapes and dtypes of a batch, which determine a program."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
