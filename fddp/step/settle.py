"""Settles a step with its first batch, and checks later batches.

The ranks compare their batches. The gradients' program gives the ready order, the order gives the
bucket plan, and the plan gives the pieces for a schedule. Later calls only run the step.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import BucketPlan, scalar_dtype, take_apart, whole_forms
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


class Admitted(NamedTuple):
    """The forms of arguments that were checked."""

    fits: tuple[Any, ...]
    """The last four checked forms of (state, batch). Four: steps and `no_sync` may alternate, each
    with arrays or promises."""
    batches: frozenset[Any]
    """Forms of batches: none reaches a leaf outside the plan."""
    share: TrainState
    """Shapes and dtypes of one replica's share of the state, with pending sums from the first
    `no_sync` on."""


class Settled(NamedTuple):
    """A step after its first batch."""

    replica: Replica
    """One replica's part of the step, with the first batch's rows as unit of weight."""
    facts: Facts
    layout: TrainState
    """Layout of the state: a tree of `PartitionSpec`s."""
    schedule: str
    """Name of the schedule."""
    runner: Runner
    """The step as the schedule runs it."""
    accumulate: jax.stages.Wrapped
    """The program of `no_sync`."""
    admitted: Admitted
    first: StepInputs | None = None
    """Shapes and dtypes of the first step's inputs, once the ranks have compared the collectives
    of their programs; None before."""

    @property
    def plan(self) -> BucketPlan:
        """The buckets."""
        return self.facts.plan

    @property
    def undivided(self) -> bool:
        """True if batches are not divided into rows: each micro-batch takes one whole batch."""
        return isinstance(unjoined(self.facts.rows), Undivided)

    @property
    def is_one_program(self) -> bool:
        """True if XLA launches the buckets (schedule "fused")."""
        return self.runner.timeline is None


def settle(replica: Replica, use: Use, state: TrainState, batch: PyTree, call: str) -> Settled:
    """Settles a step with this rank's first batch. Collective; an error is raised on every rank."""
    group = replica.group
    describe = partial(described_batch, replica, batch, call)
    find = partial(look, replica, state, batch)
    seen, digests = verify_beside(group, "batch or loss", find, describe, attrgetter("digest"))
    tell_same_rows(group, digests)
    forms = forms_of(seen.state.params)
    unit = np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches
    objective = params_checked(replica, forms, replica.objective)
    replica = replace(replica, unit=unit, objective=objective)
    layout = specs(group.placement, seen.state._replace(accumulated=None, hook_state=()))
    use_mean = params_checked(replica, forms, partial(use, replica, layout))
    facts = _agreed(replica, seen, forms_of(batch), use_mean)
    fit = _fit(replica, jax.tree.structure(state), state, batch)
    share = held_form(group.placement, state)
    return Settled(
        replica=replica,
        facts=facts,
        layout=layout,
        schedule=seen.schedule.name,
        runner=replica.way.runner(seen.schedule, replica, facts),
        accumulate=_accumulating(group.placement, replica),
        admitted=Admitted((fit,), frozenset({_form(batch)}), share),
    )


def _agreed(
    replica: Replica, seen: Seen, rows: PyTree, use: Callable[[TrainState, Mean], Any]
) -> Facts:
    """Merges the facts that all ranks have seen. Collective."""
    group = replica.group
    options = replica.options
    # Programs may differ between ranks (a branch in Python). Then rank 0's order is used, as in
    # DDP. A leaf without a path to the loss on any rank is not sent.
    order, uses, program, read_in = group.broadcast_object(
        (seen.order, seen.uses, seen.program, seen.read_in)
    )
    # Ranks with different programs cannot agree on the order of a loop's sums and other messages.
    # All ranks take the same branch, since `program` is rank 0's.
    if program and group.all_reduce(np.int32(seen.program != program), op="max"):
        order = [part._replace(rounds=1) for part in order]
    has_path, touched = seen.reach
    casts_differ = [seen.read_in.get(i) != read_in.get(i) for i in seen.chosen]
    has_path, touched, casts_differ = group.all_reduce(
        np.asarray([has_path, touched, casts_differ], np.int32), op="max"
    )
    reached = {i for i, path in zip(seen.chosen, has_path) if path}
    ready = [part for part in order if part.leaf in reached]
    # All leaves are sent if each step skips its unused ones, since a later batch may use more
    # leaves, and if replicas update shards, since every trained leaf is gathered.
    if options.skip_all_reduce_unused_params or replica.way.apart:
        ready += [part for part in order if part.leaf not in reached]
    averaged = None
    if options.broadcast_buffers == "mean":
        averaged = seen.state.model_state
    plan = replica.plan(
        seen.state.params,
        ready,
        dtype=scalar_dtype(jax.tree.leaves((seen.outputs, averaged))),
        touched={
            i: options.accumulation_steps * int(count) for i, count in zip(seen.chosen, touched)
        },
    )
    differing = {i for i, differs in zip(seen.chosen, casts_differ) if differs}
    return Facts(
        plan=replace(plan, collectives=seen.collectives),
        state=seen.state,
        chosen=seen.chosen,
        rows=rows,
        outputs=seen.outputs,
        uses=uses,
        read_in={i: dtype for i, dtype in read_in.items() if i not in differing},
        use=use,
    )


def _accumulating(placement: Placement, replica: Replica) -> jax.stages.Wrapped:
    """Makes the program of `no_sync`."""
    per_replica = placement.per_replica
    in_specs = (REPLICATED, per_replica, per_replica, per_replica)
    donated = (2,) if replica.options.donate else ()
    run = as_program(placement, partial(replica.way.accumulate, replica))
    return placement.program(run, in_specs, (per_replica, REPLICATED), donate=donated)


def admit(settled: Settled, tree: PyTree, state: TrainState, batch: PyTree) -> Settled:
    """Checks the arguments of a call, on this rank only, and records their form as checked."""
    replica = settled.replica
    admitted = settled.admitted
    fit = _fit(replica, tree, state, batch)
    if fit in admitted.fits:
        return settled
    check_params(replica, forms_of(settled.facts.state.params), whole_forms(state.params))
    gradient_state = check_held(replica, state)
    if replica.group.placement.other_axes:
        check_cuts(state, settled.layout)
    check_batch(replica, batch)
    share = admitted.share
    if share.accumulated is None and state.accumulated is not None:
        share = held_form(replica.group.placement, state)
    form = _form(batch)
    if form not in admitted.batches:
        _check_program(replica, settled.facts, gradient_state, batch)
    fits = (fit, *admitted.fits)[:4]
    return settled._replace(admitted=Admitted(fits, admitted.batches | {form}, share))


def _check_program(replica: Replica, facts: Facts, state: TrainState, batch: PyTree) -> None:
    """Raises ValueError if a batch's program reaches leaves outside the plan, or casts others.

    A batch of another form may have another program.
    """
    planned = {i for bucket in facts.plan.buckets for i in bucket.leaves}
    left_out = {i for i in facts.chosen if facts.plan.leaves[i].nbytes and i not in planned}
    if left_out:
        has_path = zip(facts.chosen, paths(replica, state, batch))
        check_paths(facts.plan, [i for i, path in has_path if path and i in left_out])
    if replica.way.gathers and facts.read_in:
        check_casts(facts.plan, facts.read_in, casts(replica, state, batch))


def _fit(replica: Replica, tree: PyTree, state: TrainState, batch: PyTree) -> Any:
    """Returns a key of (state, batch): calls with equal keys need only one check."""
    local = jax.tree.leaves(state.accumulated)[:1]
    if replica.way.apart:
        local += take_apart(state)[1]
    shardings = [getattr(x, "sharding", None) for x in local[-1:]]  # ranks are in the tree
    return tree, [x.shape for x in local], shardings, _form(batch)


def _form(batch: PyTree) -> Any:
    """Returns the structure, shapes and dtypes of a batch, which determine a program."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
