"""Gradients that are accumulated locally, as in DDP's `no_sync`."""

from typing import TYPE_CHECKING

import jax

from fddp.comm import REPLICATED, Placement, as_program
from fddp.jax_internals import without_context_mesh
from fddp.losses import Sums
from fddp.step.replica import Replica
from fddp.step.schedules import StepInputs
from fddp.step.state import TrainState

if TYPE_CHECKING:  # a settled step holds the program
    from fddp.step.settle import Settled


@without_context_mesh
def accumulate_locally(
    settled: "Settled", state: TrainState, inputs: StepInputs
) -> tuple[TrainState, Sums]:
    """Adds a batch to the pending sums locally; also returns this process's mean loss and aux."""
    group = settled.replica.group
    placement = group.placement
    replicated, pending, _, _, rows = inputs
    journal = group.journal
    journal.say("no_sync")
    with journal.inside("step.no_sync"):
        # Gradients stay local, but sharded parameters must be gathered.
        replicated = settled.replica.strategy.with_whole_params(group, state, replicated)
    rows = placement.as_program_rows(placement.retained(rows))
    accumulated, means = settled.accumulate(replicated, pending, rows)
    if placement.shares_cores:
        jax.block_until_ready(accumulated)
    placement.donation.record((state, accumulated))
    return state._replace(accumulated=accumulated), means


def accumulating(placement: Placement, replica: Replica) -> jax.stages.Wrapped:
    """Makes the program of `no_sync`."""
    per_replica = placement.per_replica
    in_specs = (REPLICATED, per_replica, per_replica)
    donated = (1,) if replica.options.donate else ()
    run = as_program(placement, replica.accumulate)
    return placement.program(run, in_specs, (per_replica, REPLICATED), donate=donated)
