"""A settled step, called."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from fddp.buckets import join, take_apart
from fddp.comm import REPLICATED, of_one_replica
from fddp.hooks import by_leaf, by_message
from fddp.jax_internals import rows_here, staged_out, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.losses import Sums, taken
from fddp.schedules import Footprint, Promise, TaskList, forms_of
from fddp.step.checks import refuse_transformations, verify_collectives
from fddp.step.debug_nans import with_finite_results
from fddp.step.replica import Replica
from fddp.step.settle import Settled, Use, admit, settle
from fddp.step.state import TrainState, check_state, opened, promised

# What is equal on all replicas, pending, in shards, remembered for each message, and the rows: as programs take them.
Given: TypeAlias = tuple[TrainState, Any, Any, Any, Any]


@without_context_mesh
def ready(
    settled: Settled | None, replica: Replica, use: Use, state: TrainState, batch: Any, call: str = "step"
) -> tuple[Settled, Given]:
    """A step that is settled, and arguments that fit it.

    Args:
      settled: the step, or None before the first batch.
      replica: what one replica does.
      use: what is done with averaged gradients.
      state: what a call was given.
      batch: likewise.
      call: its name.

    Returns:
      The settled step, and state and batch as its arguments.
    """
    refuse_transformations()
    if settled:  # the first call checks it on all ranks together, in `settle`
        check_state(state)
    # Taken apart once: after a step of large arrays its leaves are far from the cache.
    given = opened(state) if settled and settled.runner.promises else state
    leaves, tree = jax.tree.flatten(given)
    rows = _rows(replica, batch, settled and settled.undivided)
    if settled is None:
        refuse_deleted(leaves)
        settled = settle(replica, use, state, rows, call)
        settled.runner.rehearse(*_of_one_replica(settled, state, rows))
    else:
        settled = admit(settled, tree, state, rows)
    return settled, (*_given(settled, given, leaves), rows)


@without_context_mesh
def compare(settled: Settled, given: Given) -> Settled:
    """Compares what the ranks' programs send, once; keep what comes back before anything is run.

    A rank whose first run fails alone and is tried again would else compare alone, and wait for ever.

    Args:
      settled: the step.
      given: its arguments.

    Returns:
      The step, which knows that all ranks send the same.

    Raises:
      ValueError: they do not; on every rank.
    """
    group = settled.replica.group
    lower = settled.runner.lower
    if not settled.compared and lower and group.processes > 1:
        verify_collectives(group, lower(*given))
    return settled if settled.compared else settled._replace(compared=True, first=_forms(settled, given))


@without_context_mesh
@with_finite_results
def synchronize(settled: Settled, state: TrainState, given: Given) -> Any:
    """Gradients of all replicas' rows, averaged and used.

    Args:
      settled: the step.
      state: the state.
      given: its arguments.

    Returns:
      What `use` made of them, with what the hook remembers, if it does.
    """
    group = settled.replica.group
    timeline = settled.runner.timeline
    with group.journal.step(_processes(settled, state)), group.recovery:
        result, shards, memory = settled.runner.run(*given)
        if timeline:
            group.journal.computed(timeline().computing)
        # Of the pair that a use returns the second is the smaller one.
        group.journal.launched(result[1])
    return _with_own(settled, state, result, shards, memory)


def inside(settled: Settled | None, state: TrainState, batch: Any) -> Any:
    """A settled step as a part of the user's own program, under `jax.jit` or in `jax.lax.scan`.

    Args:
      settled: the step, or None before the first batch.
      state: as for a step.
      batch: the rows of all processes.

    Returns:
      What `use` made of averaged gradients.

    Raises:
      TypeError: the step is not settled, needs the host, or is differentiated or mapped.
      ValueError: state or batch do not fit.
    """
    if settled is None:
        raise _not_inside("its first batch settles it, outside of jit; step.lower(state, batch) settles it, too")
    run = settled.runner.inside
    if run is None:
        raise _not_inside("it needs Python between its programs; a step with schedule='fused' does not, but over MPI")
    if not staged_out((state, batch)):
        raise _not_inside("it can be a part of jax.jit and jax.lax.scan alone, over all replicas")
    check_state(state)
    replica = settled.replica
    processes = replica.group.processes
    rows = taken(batch, replica.micro_batches * processes, undivided=settled.undivided)
    admit(settled, jax.tree.structure(state), forms_of(state), of_one_replica(rows, processes))
    memory = by_message(settled.plan, state.hook_state) if jax.tree.leaves(state.hook_state) else ()
    replicated, shards = state._replace(accumulated=None, hook_state=()), []
    if replica.way.apart:
        replicated, shards = take_apart(replicated)
    result, shards, memory = run(replicated, state.accumulated, shards, memory, rows)
    return _with_own(settled, state, result, shards, memory)


@without_context_mesh
@with_finite_results
def accumulate(settled: Settled, state: TrainState, given: Given) -> tuple[TrainState, Sums]:
    """Adds a batch to what is pending, without traffic; also tells this process's own mean loss and aux."""
    group = settled.replica.group
    placement = group.placement
    replicated, pending, shards, _, rows = given
    journal = group.journal
    journal.say("no_sync")
    # No gradient is sent; parameters that rest in shards have to come together all the same.
    replicated = promised(settled.replica.way.gathered(group, state, replicated))
    accumulated, means = settled.accumulate(replicated, shards, pending, placement.feed(rows))
    if placement.shares_cores:
        jax.block_until_ready(accumulated)
    journal.adds(_processes(settled, state))
    return state._replace(accumulated=accumulated), means


@without_context_mesh
def lower(settled: Settled, given: Given) -> jax.stages.Lowered:
    """The whole step as XLA gets it."""
    if settled.runner.lower is None:
        raise ValueError(
            "this step runs several programs; a step that can be lowered has schedule='fused' and no virtual_replicas."
        )
    return settled.runner.lower(*given)


@without_context_mesh
def tasks(settled: Settled, state: TrainState, given: Given) -> TaskList:
    """The tasks that a step with arguments of this form launches."""
    return settled.runner.tasks(*_of_one_replica(settled, state, given[-1]))


def first_tasks(settled: Settled) -> TaskList:
    """The tasks that the first step has launched."""
    state, pending, shards, _, rows = settled.first
    own = of_one_replica((pending, shards, rows), settled.replica.group.placement.replicas_in_array)
    return settled.runner.tasks(state, *own)


def _rows(replica: Replica, batch: Any, undivided: bool | None) -> Any:
    """This process's rows, as programs take them."""
    local = jax.tree.map(rows_here, batch) if replica.group.processes > 1 else batch
    return taken(local, replica.micro_batches, undivided=undivided)


def _processes(settled: Settled, state: TrainState) -> int:
    """The number of processes that wait for each other in the step that is due, as the watchers are to know."""
    return settled.replica.group.processes if settled.runner.waits(state) else 1


def _of_one_replica(settled: Settled, state: TrainState, rows: Any) -> tuple[Any, Any, Any, Any]:
    """The arguments of a schedule as one replica has them: the state itself, and the forms of all else."""
    group = settled.replica.group
    replicated, shards = take_apart(state._replace(accumulated=None, hook_state=()))
    pending, shards = of_one_replica((state.accumulated, shards), group.placement.replicas_in_array)
    return replicated, pending, shards, of_one_replica(rows, group.size // group.processes)


def _given(settled: Settled, state: TrainState, leaves: Sequence[Any]) -> tuple[TrainState, Any, Any, Any]:
    placement = settled.replica.group.placement

    def placed(x: Any) -> Any:
        return x if isinstance(x, Promise) else placement.place(x, placement.per_replica)

    memory = ()
    if jax.tree.leaves(state.hook_state):
        refuse_deleted(_there(leaves))
        memory = jax.tree.map(placed, by_message(settled.plan, state.hook_state))
        state = state._replace(hook_state=())
        leaves = jax.tree.leaves(state)
    # A step is nearly always given what a step has returned: then nothing is made anew.
    if state.accumulated is None and not settled.replica.way.apart and placement.holds(_there(leaves)):
        return state, None, (), memory
    refuse_deleted(_there(leaves))
    # A user may have put numbers, NumPy's arrays or arrays of one device into the state.
    state = promised(state)
    replicated = state._replace(accumulated=None)
    shards = []
    if settled.replica.way.apart:
        replicated, shards = take_apart(replicated)
    own = placement.place((state.accumulated, shards), placement.per_replica)
    return placement.place(replicated, REPLICATED), *own, memory


def _not_inside(why: str) -> TypeError:
    return TypeError(f"this step cannot be called under jax.jit, grad or vmap: {why}.")


def _with_own(settled: Settled, state: TrainState, result: Any, shards: Any, memory: Any) -> Any:
    """A step's result, with what each replica has for itself: its shards, and what its hooks remember."""
    if settled.replica.way.apart:
        result = join(result, shards)
    if isinstance(result[0], TrainState):
        hook_state = opened(state).hook_state
        remembers = jax.tree.leaves(hook_state)
        new = result[0]._replace(hook_state=by_leaf(settled.plan, hook_state, memory)) if remembers else result[0]
        result = promised(new) if settled.runner.promises else new, *result[1:]
    return result


def _there(leaves: Sequence[Any]) -> list[Any]:
    """The arrays among these that are there already."""
    return [array for x in leaves for array in (x.there() if isinstance(x, Promise) else [x])]


@without_context_mesh
def footprint(settled: Settled, state: TrainState, batch: Any) -> Footprint | None:
    """The memory that one replica needs for a step, task by task; nothing runs.

    Args:
      settled: the step.
      state: as for a step.
      batch: likewise.

    Returns:
      The bytes; None where XLA does not tell.
    """
    given = opened(state) if settled.runner.promises else state
    rows = _rows(settled.replica, batch, settled.undivided)
    return settled.runner.footprint(*_given(settled, given, jax.tree.leaves(given)), rows)


def _forms(settled: Settled, given: Given) -> Given:
    """The forms of a step's arguments, as all replicas together have them."""
    group = settled.replica.group
    *held, rows = given
    processes = group.placement.replicas_in_array * group.processes // group.size  # whose rows lie in one array

    def form(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(x)
        return jax.ShapeDtypeStruct((processes * shape[0], *shape[1:]) if shape else (), jax.typeof(x).dtype)

    return (*jax.tree.map(form, held), jax.tree.map(of_all, rows))
