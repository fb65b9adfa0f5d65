"""Settles a step with its first batch.

The ranks compare their batches. The gradients' program gives the ready order, the order gives the
bucket plan, and the plan gives the pieces for a schedule. Later calls only run the step.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import BucketPlan
from fddp.comm import REPLICATED, as_program, forms_of, specs, verify
from fddp.losses import Undivided, unjoined
from fddp.step.agreed import Agreed, Seen, merge, remarks
from fddp.step.checks import params_checked
from fddp.step.first_batch import described_batch, look
from fddp.step.later_batches import CheckedForms, fit_of, form_of_batch
from fddp.step.options import ScheduleName
from fddp.step.replica import Replica
from fddp.step.schedules import Runner, Schedule, after, eager, overlap
from fddp.step.state import Mean, TrainState
from fddp.step.state_layout import local_form

FIRST_BATCH = "batch or loss (pad the first batch to the same shapes on all ranks)"
SCHEDULES: dict[ScheduleName, Schedule] = {
    "auto": overlap,
    "overlap": overlap,
    "after": after,
    "eager": eager,
}
# (replica, layout of the state, state, mean) → result of a call; runs on every replica
FinishStep = Callable[[Replica, TrainState, TrainState, Mean], Any]


class Settled(NamedTuple):
    """A step after its first batch."""

    replica: Replica
    """One replica's part of the step, with the first batch's rows as unit of weight."""
    agreed: Agreed
    runner: Runner
    """The step as the schedule runs it."""
    accumulate: jax.stages.Wrapped
    """The program of `no_sync`."""
    checked_forms: CheckedForms
    compared: bool = False
    """True once the ranks have compared the collectives of their programs."""

    @property
    def plan(self) -> BucketPlan:
        """The buckets."""
        return self.agreed.plan

    @property
    def undivided(self) -> bool:
        """True if batches are not divided into rows: each micro-batch takes one whole batch."""
        return isinstance(unjoined(self.agreed.common.rows), Undivided)

    @property
    def is_one_program(self) -> bool:
        """True if the step is one XLA program."""
        return self.runner.lower is not None


def settle(
    replica: Replica, use: FinishStep, state: TrainState, batch: PyTree, call: str
) -> Settled:
    """Settles a step with this rank's first batch. Collective; an error is raised on every rank."""
    group = replica.group
    describe = partial(described_batch, replica, batch, call)
    common, local = verify(group, FIRST_BATCH, partial(look, replica, state, batch), describe)
    seen: list[Seen] = group.all_gather_object(local)
    for remark in remarks(seen):
        group.print(remark, file=sys.stderr)
    forms = forms_of(common.state.params)
    unit = np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches
    objective = params_checked(replica, forms, replica.objective)
    # The step evaluates the trace of the first batch again, if it computes the same.
    other = replica.strategy.replicas or group.placement.other_axes
    first = None if other or replica.options.find_unused_parameters else common.first
    replica = replace(replica, unit=unit, objective=objective, first=first)
    layout = specs(group.placement, common.state._replace(accumulated=None, hook_state=()))
    use_mean = params_checked(replica, forms, partial(use, replica, layout))
    agreed = merge(replica, common, seen, use_mean)
    fit = fit_of(replica, jax.tree.structure(state), state, batch)
    share = local_form(group.placement, state)
    per_replica = group.placement.per_replica
    accumulate = group.placement.program(
        as_program(group.placement, replica.accumulate),
        (REPLICATED, per_replica, per_replica),
        (per_replica, REPLICATED),
        donate=(1,) if replica.options.donate else (),
    )
    return Settled(
        replica=replica,
        agreed=agreed,
        runner=replica.strategy.runner(
            SCHEDULES[replica.options.schedule], _in_lane(replica), agreed
        ),
        accumulate=accumulate,
        checked_forms=CheckedForms((fit,), frozenset({form_of_batch(batch)}), share),
    )


def _in_lane(replica: Replica) -> Replica:
    """Makes the messages of the program travel in the group's lane, while the program computes."""
    group = replica.group
    transport = group.transport
    if transport.in_lanes is None:
        return replica
    placement, communicator = transport.in_lanes(transport.lanes, group.journal)
    return replace(replica, group=replace(group, placement=placement, communicator=communicator))
