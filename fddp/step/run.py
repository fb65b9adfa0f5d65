"""Calls of a settled step."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import insert_shards, take_apart
from fddp.comm import REPLICATED, of_one_replica
from fddp.hooks import Memory, by_leaf, by_message
from fddp.jax_internals import Promise, awaited, rows_here, staged_out, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.losses import Sums, rows_of_batch
from fddp.schedules import Footprint, StepInputs, TaskList, forms_of
from fddp.step.checks import refuse_transformations, verify_collectives
from fddp.step.debug_nans import with_finite_results
from fddp.step.replica import Replica
from fddp.step.settle import Settled, Use, admit, settle
from fddp.step.state import TrainState, check_state, form_of


@without_context_mesh
def ready(
    settled: Settled | None,
    replica: Replica,
    use: Use,
    state: TrainState,
    batch: PyTree,
    call: str = "step",
) -> tuple[Settled, StepInputs]:
    """Settles a step, or checks a later batch; also returns the arguments of its programs."""
    refuse_transformations()
    if settled:  # `settle` checks the first state, with all ranks
        check_state(state)
    # Flattened only once: after a step of large arrays the processor's caches are cold.
    leaves, tree = jax.tree.flatten(state)
    if not (settled and settled.runner.promises) and _has_promises(leaves):
        leaves = list(map(awaited, leaves))
        state = tree.unflatten(leaves)
    rows = _rows(replica, batch, settled and settled.undivided)
    if settled is None:
        refuse_deleted(leaves)
        settled = settle(replica, use, state, rows, call)
        settled.runner.rehearse(*_of_one_replica(settled, state, rows))
    else:
        settled = admit(settled, tree, state, rows)
    return settled, _inputs(settled, state, leaves, rows)


@without_context_mesh
def compare(settled: Settled, inputs: StepInputs) -> Settled:
    """Compares the collectives of the ranks' programs once; raises on every rank if they differ.

    The caller must keep the result before the first run. Otherwise a rank whose first run fails
    alone would compare alone at its next call, and wait forever.
    """
    group = settled.replica.group
    lower = settled.runner.lower
    if settled.first is not None:
        return settled
    if lower and group.processes > 1:
        verify_collectives(group, lower(inputs))
    return settled._replace(first=_forms(settled, inputs))


@without_context_mesh
@with_finite_results
def synchronize(settled: Settled, state: TrainState, inputs: StepInputs) -> Any:
    """Runs a step: averages the gradients of all replicas, and returns the result of `use`."""
    group = settled.replica.group
    timeline = settled.runner.timeline
    with group.journal.step(_processes(settled, state)), group.recovery:
        result, shards, memory = settled.runner.run(inputs)
        if timeline:
            group.journal.computed(timeline().computing)
        # The report of a step; its state is donated to the next one.
        group.journal.launched(result[1])
    return _with_own(settled, state, result, shards, memory)


def run_inside(settled: Settled | None, state: TrainState, batch: PyTree) -> Any:
    """Runs a settled step inside the user's program, in `jax.jit` or `jax.lax.scan`.

    `batch` has the rows of all processes. Raises TypeError if the step is not settled, needs the
    host, or is differentiated or mapped.
    """
    if settled is None:
        raise _not_inside(
            "its first batch settles it, outside of jit; step.lower(state, batch) settles it, too"
        )
    run = settled.runner.inside
    if run is None:
        raise _not_inside(
            "it needs Python between its programs; a step with schedule='fused' does not, but over "
            "MPI"
        )
    if not staged_out((state, batch)):
        raise _not_inside("it can be a part only of jax.jit and jax.lax.scan, over all replicas")
    check_state(state)
    replica = settled.replica
    processes = replica.group.processes
    rows = rows_of_batch(batch, replica.micro_batches * processes, undivided=settled.undivided)
    admit(settled, jax.tree.structure(state), forms_of(state), of_one_replica(rows, processes))
    memory = by_message(settled.plan, state.hook_state) if jax.tree.leaves(state.hook_state) else ()
    replicated, shards = state._replace(accumulated=None, hook_state=()), []
    if replica.way.apart:
        replicated, shards = take_apart(replicated)
    inputs = StepInputs(replicated, state.accumulated, shards, memory, rows)
    result, shards, memory = run(inputs)
    return _with_own(settled, state, result, shards, memory)


@without_context_mesh
@with_finite_results
def accumulate_locally(
    settled: Settled, state: TrainState, inputs: StepInputs
) -> tuple[TrainState, Sums]:
    """Adds a batch to the pending sums locally; also returns this process's mean loss and aux."""
    group = settled.replica.group
    placement = group.placement
    replicated, pending, shards, _, rows = inputs
    journal = group.journal
    journal.say("no_sync")
    # Gradients stay local, but sharded parameters must be gathered.
    gathered = settled.replica.way.gathered(group, state, replicated)
    replicated = jax.tree.map(awaited, gathered)
    accumulated, means = settled.accumulate(replicated, shards, pending, placement.feed(rows))
    if placement.shares_cores:
        jax.block_until_ready(accumulated)
    journal.adds(_processes(settled, state))
    return state._replace(accumulated=accumulated), means


@without_context_mesh
def lower(settled: Settled, inputs: StepInputs) -> jax.stages.Lowered:
    """Lowers a step that is one program."""
    if settled.runner.lower is None:
        raise ValueError(
            "this step runs several programs; a step that can be lowered has schedule='fused' and "
            "no virtual_replicas."
        )
    return settled.runner.lower(inputs)


@without_context_mesh
def tasks(settled: Settled, state: TrainState, inputs: StepInputs) -> TaskList:
    """Lists the tasks of a step."""
    return settled.runner.tasks(*_of_one_replica(settled, state, inputs.rows))


def first_tasks(settled: Settled) -> TaskList:
    """Lists the tasks of the first step."""
    if settled.first is None:
        raise ValueError("no step has run yet: call step(state, batch) first.")
    state, pending, shards, _, rows = settled.first
    replicas = settled.replica.group.placement.replicas_in_array
    return settled.runner.tasks(state, *of_one_replica((pending, shards, rows), replicas))


def _rows(replica: Replica, batch: PyTree, undivided: bool | None) -> Any:
    """Converts a batch to this process's rows, in the form of programs."""
    local = jax.tree.map(rows_here, batch) if replica.group.processes > 1 else batch
    return rows_of_batch(local, replica.micro_batches, undivided=undivided)


def _processes(settled: Settled, state: TrainState) -> int:
    """Counts the processes that wait for each other in the next step, for the watchers."""
    return settled.replica.group.processes if settled.runner.waits(state) else 1


def _of_one_replica(settled: Settled, state: TrainState, rows: PyTree) -> tuple[Any, Any, Any, Any]:
    """Returns the arguments of one replica: the replicated state, and shapes of the others."""
    group = settled.replica.group
    replicated, shards = take_apart(state._replace(accumulated=None, hook_state=()))
    pending, shards = of_one_replica((state.accumulated, shards), group.placement.replicas_in_array)
    return replicated, pending, shards, of_one_replica(rows, group.size // group.processes)


def _inputs(settled: Settled, state: TrainState, leaves: Sequence[Any], rows: PyTree) -> StepInputs:
    """Splits a state into the programs' arguments, on the group's devices."""
    placement = settled.replica.group.placement

    def placed(x: Any) -> Any:
        return x if isinstance(x, Promise) else placement.place(x, placement.per_replica)

    memory = ()
    if jax.tree.leaves(state.hook_state):
        refuse_deleted(_there(leaves))
        memory = jax.tree.map(placed, by_message(settled.plan, state.hook_state))
        state = state._replace(hook_state=())
        leaves = jax.tree.leaves(state)
    # The usual state comes from the last step, and needs no placement.
    if (
        state.accumulated is None
        and not settled.replica.way.apart
        and placement.holds(_there(leaves))
    ):
        return StepInputs(state, None, (), memory, rows)
    refuse_deleted(_there(leaves))
    # The user may have put numbers, NumPy arrays or arrays of one device into the state.
    state = jax.tree.map(awaited, state)
    replicated = state._replace(accumulated=None)
    shards = []
    if settled.replica.way.apart:
        replicated, shards = take_apart(replicated)
    local = state.accumulated, shards
    pending, shards = placement.place(local, placement.per_replica)
    return StepInputs(placement.place(replicated, REPLICATED), pending, shards, memory, rows)


def _not_inside(why: str) -> TypeError:
    return TypeError(f"this step cannot be called under jax.jit, grad or vmap: {why}.")


def _with_own(
    settled: Settled, state: TrainState, result: Any, shards: PyTree, memory: Memory
) -> Any:
    """Puts a replica's shards and the hook's memory back into a step's result."""
    if settled.replica.way.apart:
        result = insert_shards(result, shards)
    if isinstance(result[0], TrainState):
        hook_state = state.hook_state
        if jax.tree.leaves(hook_state):
            new = result[0]._replace(hook_state=by_leaf(settled.plan, hook_state, memory))
            result = new, *result[1:]
    return result


def _has_promises(leaves: Sequence[Any]) -> bool:
    # Six times as fast as `isinstance`, which asks a metaclass for each leaf in every step.
    return Promise in set(map(type, leaves))


def _there(leaves: Sequence[Any]) -> list[Any]:
    """Lists the arrays that are available without waiting."""
    if not _has_promises(leaves):
        return list(leaves)
    return [awaited(x) for x in leaves if not isinstance(x, Promise) or x.done()]


@without_context_mesh
def memory_footprint(settled: Settled, state: TrainState, batch: PyTree) -> Footprint | None:
    """Finds the memory of one replica, task by task, without a run; None if XLA reports none."""
    rows = _rows(settled.replica, batch, settled.undivided)
    return settled.runner.footprint(_inputs(settled, state, jax.tree.leaves(state), rows))


def _forms(settled: Settled, inputs: StepInputs) -> StepInputs:
    """Returns shapes and dtypes of a step's arguments, with all replicas' rows in one array."""
    group = settled.replica.group
    # The processes with rows in one array.
    processes = group.placement.replicas_in_array * group.processes // group.size

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(x)
        return jax.ShapeDtypeStruct(
            (processes * shape[0], *shape[1:]) if shape else (), jax.typeof(x).dtype
        )

    rows = jax.tree.map(of_all, inputs.rows)
    return jax.tree.map(form_of, inputs._replace(rows=()))._replace(rows=rows)
