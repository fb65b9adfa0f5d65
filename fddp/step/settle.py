"""Settles a step with its first batch.

The ranks compare their batches. The gradients' program gives the ready order, the order gives the
bucket plan, and the plan gives the pieces for a schedule. Later calls only run the step.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import BucketPlan, scalar_dtype
from fddp.comm import specs, verify_beside
from fddp.losses import Undivided, unjoined
from fddp.schedules import Runner, forms_of
from fddp.step.admission import Admitted, fit_of, form_of_batch
from fddp.step.checks import params_checked
from fddp.step.first_batch import Seen, described_batch, look
from fddp.step.held import held_form
from fddp.step.no_sync import accumulating
from fddp.step.planned import plan_buckets
from fddp.step.rank_remarks import DIGEST, tell_other_programs, tell_same_rows
from fddp.step.replica import Replica
from fddp.step.state import Mean, TrainState
from fddp.step.way import Facts

FIRST_BATCH = "batch or loss (pad the first batch to the same shapes on all ranks)"
# (replica, layout of the state, state, mean) → result of a call; runs on every replica
Use = Callable[[Replica, TrainState, TrainState, Mean], Any]


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
    compared: bool = False
    """True once the ranks have compared the collectives of their programs."""

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
    seen, digests = verify_beside(
        group, FIRST_BATCH, find, describe, lambda seen: seen.digest + seen.wiring
    )
    tell_same_rows(group, [both[:DIGEST] for both in digests])
    tell_other_programs(group, [both[DIGEST:] for both in digests])
    forms = forms_of(seen.state.params)
    unit = np.shape(jax.tree.leaves(batch)[0])[0] // replica.micro_batches
    objective = params_checked(replica, forms, replica.objective)
    replica = replace(replica, unit=unit, objective=objective)
    layout = specs(group.placement, seen.state._replace(accumulated=None, hook_state=()))
    use_mean = params_checked(replica, forms, partial(use, replica, layout))
    facts = _agreed(replica, seen, forms_of(batch), use_mean)
    fit = fit_of(replica, jax.tree.structure(state), state, batch)
    share = held_form(group.placement, state)
    return Settled(
        replica=replica,
        facts=facts,
        layout=layout,
        schedule=seen.schedule.name,
        runner=replica.way.runner(seen.schedule, replica, facts),
        accumulate=accumulating(group.placement, replica),
        admitted=Admitted((fit,), frozenset({form_of_batch(batch)}), share),
    )


def _agreed(
    replica: Replica, seen: Seen, rows: PyTree, use: Callable[[TrainState, Mean], Any]
) -> Facts:
    """Merges the facts that all ranks have seen. Collective."""
    group = replica.group
    options = replica.options
    # Programs may differ between ranks (a branch in Python). Then rank 0's order is used, as in
    # DDP. A leaf without a path to the loss on any rank is not sent.
    order, uses, program = group.broadcast_object((seen.order, seen.uses, seen.program))
    # Ranks with different programs cannot agree on the order of a loop's sums and other messages.
    # All ranks take the same branch, since `program` is rank 0's.
    if program and group.all_reduce(np.int32(seen.program != program), op="max"):
        order = [part._replace(rounds=1) for part in order]
    has_path, touched = seen.reach
    has_path, touched = group.all_reduce(np.asarray([has_path, touched], np.int32), op="max")
    reached = {i for i, path in zip(seen.chosen, has_path) if path}
    ready = [part for part in order if part.leaf in reached]
    # If replicas update shards, every trained leaf is gathered.
    if replica.way.apart:
        ready += [part for part in order if part.leaf not in reached]
    averaged = None
    if options.broadcast_buffers == "mean":
        averaged = seen.state.model_state
    plan = plan_buckets(
        replica,
        seen.state.params,
        ready,
        dtype=scalar_dtype(jax.tree.leaves((seen.outputs, averaged))),
        touched={
            i: options.accumulation_steps * int(count) for i, count in zip(seen.chosen, touched)
        },
    )
    return Facts(
        plan=replace(plan, collectives=seen.collectives),
        state=seen.state,
        chosen=seen.chosen,
        rows=rows,
        outputs=seen.outputs,
        uses=uses,
        use=use,
    )
