"""Calls of a settled step from Python."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.buckets import insert_shards, split_shards
from fddp.comm import REPLICATED, shortened
from fddp.hooks import Memory, by_leaf, by_message
from fddp.jax_internals import rows_here, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.losses import Sums, not_numeric, rows_of_batch
from fddp.step.checks import refuse_nan_checks, refuse_transformations, verify_collectives
from fddp.step.later_batches import admit, form_of_batch
from fddp.step.replica import Replica
from fddp.step.schedules import StateInFlight, StepInputs, finished
from fddp.step.settle import FinishStep, Settled, settle
from fddp.step.state import TrainState, check_state


@without_context_mesh
def ready(
    settled: Settled | None,
    replica: Replica,
    use: FinishStep,
    state: TrainState,
    batch: PyTree,
    call: str = "step",
) -> tuple[Settled, StepInputs]:
    """Settles a step, or checks a later batch; also returns the arguments of its programs."""
    refuse_transformations()
    refuse_nan_checks()
    if isinstance(state, StateInFlight):
        refuse_deleted(state.step)
        rows = local_rows(replica, batch, settled and settled.undivided)
        known = settled and form_of_batch(rows) in settled.checked_forms.batches
        if settled and known and call == "step" and settled.runner.goes_on(state):
            return settled, StepInputs(state, None, [], (), rows)
        state = state.finish()
    if settled:  # `settle` checks the first state, with all ranks
        check_state(state)
    # Flattened only once: after a step of large arrays the processor's caches are cold.
    leaves, tree = jax.tree.flatten(state)
    rows = local_rows(replica, batch, settled and settled.undivided)
    if settled is None:
        refuse_deleted(leaves)
        settled = settle(replica, use, state, rows, call)
        return settled, step_inputs(settled, state, leaves, rows)
    try:
        settled = admit(settled, tree, state, rows)
        return settled, step_inputs(settled, state, leaves, rows)
    except TypeError as error:  # JAX names no leaf
        if wrong := not_numeric(state):
            raise TypeError(f"the state holds {shortened(wrong)}: give numbers.") from error
        raise


@without_context_mesh
def compare(settled: Settled, inputs: StepInputs) -> Settled:
    """Compares the collectives of the ranks' programs once; raises on every rank if they differ.

    The caller must keep the result before the first run. Otherwise a rank whose first run fails
    alone would compare alone at its next call, and wait forever.
    """
    group = settled.replica.group
    lower = settled.runner.lower
    if settled.compared:
        return settled
    if lower and group.processes > 1:
        verify_collectives(group, lower(inputs))
    return settled._replace(compared=True)


@without_context_mesh
def synchronize(settled: Settled, state: TrainState, inputs: StepInputs) -> Any:
    """Runs a step: averages the gradients of all replicas, and returns the result of `use`."""
    group = settled.replica.group
    group.journal.refuse_broken()
    with group.journal.step(group.processes):
        try:
            result, shards, memory = settled.runner.run(inputs)
        except BaseException:
            group.journal.broken = group.processes > 1
            raise
        # The report of a step; its state is donated to the next one.
        group.journal.launched(result[1])
    group.placement.donation.record((result[0], shards, memory))
    return with_local_parts(settled, state, result, shards, memory)


def local_rows(replica: Replica, batch: PyTree, undivided: bool | None) -> Any:
    """Converts a batch to this process's rows, in the form of programs."""
    local = jax.tree.map(rows_here, batch) if replica.group.processes > 1 else batch
    return rows_of_batch(local, replica.micro_batches, undivided=undivided)


def step_inputs(
    settled: Settled, state: TrainState, leaves: Sequence[Any], rows: PyTree
) -> StepInputs:
    """Splits a state into the programs' arguments, on the group's devices."""
    placement = settled.replica.group.placement

    memory = ()
    if jax.tree.leaves(state.hook_state):
        refuse_deleted(leaves)
        memory = by_message(settled.plan, state.hook_state)
        memory = placement.place(memory, placement.per_replica)
        state = state._replace(hook_state=())
        leaves = jax.tree.leaves(state)
    # The usual state comes from the last step, and needs no placement.
    if (
        state.accumulated is None
        and not settled.replica.strategy.in_shards
        and placement.donation.fits(leaves)
    ):
        return StepInputs(state, None, (), memory, rows)
    refuse_deleted(leaves)
    # The user may have put numbers, NumPy arrays or arrays of one device into the state.
    replicated = state._replace(accumulated=None)
    shards = []
    if settled.replica.strategy.in_shards:
        replicated, shards = split_shards(replicated)
    local = state.accumulated, shards
    pending, shards = placement.place(local, placement.per_replica)
    replicated = placement.place(replicated, REPLICATED)
    replicated, pending, shards = placement.donation.unshared((replicated, pending, shards))
    return StepInputs(replicated, pending, shards, memory, rows)


def with_local_parts(
    settled: Settled, state: TrainState, result: Any, shards: PyTree, memory: Memory
) -> Any:
    """Puts a replica's shards and the hook's memory back into a step's result."""
    if settled.replica.strategy.in_shards and not isinstance(result[0], StateInFlight):
        result = insert_shards(result, shards)
    if isinstance(result[0], TrainState) and jax.tree.leaves(finished(state).hook_state):
        hook_state = by_leaf(settled.plan, finished(state).hook_state, memory)
        result = result[0]._replace(hook_state=hook_state), *result[1:]
    return result


@without_context_mesh
def lower(settled: Settled, inputs: StepInputs) -> jax.stages.Lowered:
    """Lowers a step that is one program."""
    if settled.runner.lower is None:
        raise ValueError(
            "a step with virtual_replicas runs several programs: leave virtual_replicas out to "
            "lower it."
        )
    return settled.runner.lower(inputs)


@without_context_mesh
def accumulate_locally(
    settled: Settled, state: TrainState, inputs: StepInputs
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
