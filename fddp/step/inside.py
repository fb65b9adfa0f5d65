"""Calls of a settled step inside the user's program."""

from typing import Any

import jax
from jaxtyping import PyTree

from fddp.buckets import split_shards
from fddp.comm import forms_of, of_one_replica
from fddp.hooks import by_message
from fddp.jax_internals import staged_out
from fddp.losses import rows_of_batch
from fddp.step.call import with_local_parts
from fddp.step.later_batches import admit
from fddp.step.schedules import StateInFlight, StepInputs
from fddp.step.settle import Settled
from fddp.step.state import TrainState, check_state


def run_inside(settled: Settled | None, state: TrainState, batch: PyTree) -> Any:
    """Runs a settled step inside the user's program, in `jax.jit` or `jax.lax.scan`."""
    if settled is None:
        raise _not_inside(
            "its first batch settles it, outside of jit, as step.lower(state, batch) does"
        )
    run = settled.runner.inside
    if run is None:
        raise _not_inside(
            "with fddp.local_steps or virtual_replicas, and over MPI without fddp's lane (see "
            "`python -m fddp doctor`), call it from Python"
        )
    if not staged_out((state, batch)):
        raise _not_inside("it can be a part only of jax.jit and jax.lax.scan, over all replicas")
    check_state(state)
    replica = settled.replica
    # Over MPI each process has a program of its own, and its own rows.
    processes = replica.group.processes if replica.group.placement.on_mesh else 1
    rows = rows_of_batch(batch, replica.micro_batches * processes, undivided=settled.undivided)
    if isinstance(state, StateInFlight):
        if settled.runner.goes_on(state):
            return run(StepInputs(state, None, [], (), rows)).result
        state = state.finish()
    admit(settled, jax.tree.structure(state), forms_of(state), of_one_replica(rows, processes))
    memory = by_message(settled.plan, state.hook_state) if jax.tree.leaves(state.hook_state) else ()
    replicated = state._replace(accumulated=None, hook_state=())
    shards = []
    if replica.strategy.in_shards:
        replicated, shards = split_shards(replicated)
    inputs = StepInputs(replicated, state.accumulated, shards, memory, rows)
    result, shards, memory = run(inputs)
    return with_local_parts(settled, state, result, shards, memory)


def _not_inside(why: str) -> TypeError:
    return TypeError(f"this step cannot be called under jax.jit, grad or vmap: {why}.")
