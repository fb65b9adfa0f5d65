"""Runs all tasks in one XLA program, whose scheduler overlaps messages with computation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.comm import REPLICATED, Communicator, Group, add_replica_dim, drop_replica_dim
from fddp.hooks import Memory, all_finite, summed
from fddp.jaxpr import fused_loops
from fddp.schedules.compiling import compiling, first_call
from fddp.schedules.lists import in_one_piece
from fddp.schedules.pieces import MakeList, Pieces, Runner, Schedule, StepInputs, StepOutputs
from fddp.schedules.tasks import Communicate, TaskList
from fddp.schedules.values import BYTES, Value


def in_one_program(group: Group, make: MakeList, donate: bool) -> Runner:
    """Traces a list into one program, in which messages leave one after the other.

    If `donate`, the program may reuse the state's memory.
    """
    per_replica = group.placement.per_replica
    in_specs = REPLICATED, per_replica, per_replica, per_replica, per_replica
    out_specs = REPLICATED, per_replica, per_replica
    step = partial(traced, group, make)
    donated: tuple[int, ...] = ()
    if donate:
        donated = (0, 2, 3)  # state, shards and memory; the result has no pending sums or rows
    program = group.placement.program(step, in_specs, out_specs, donate=donated)
    launch = first_call(program, "the step", partial(compiling, group))

    def fed(inputs: StepInputs) -> StepInputs:
        rows = group.placement.retained(inputs.rows)
        return inputs._replace(rows=group.placement.feed(rows))

    def run(inputs: StepInputs) -> StepOutputs:
        result = StepOutputs(*launch(*fed(inputs)))
        if group.placement.shares_cores:
            jax.block_until_ready(result)
        return result

    def lower(inputs: StepInputs) -> jax.stages.Lowered:
        return program.lower(*fed(inputs))

    def inside(inputs: StepInputs) -> StepOutputs:
        # A program inside another one cannot have compiler options.
        without_options: Any = program
        return StepOutputs(*without_options.__wrapped__(*inputs))

    runner = Runner(run, lower, None, make)
    if group.placement.on_mesh or group.transport.in_lane:
        return runner._replace(inside=inside)
    return runner


def traced(
    group: Group,
    make: MakeList,
    state: Any,
    pending: PyTree,
    shards: PyTree,
    memory: Memory,
    rows: PyTree,
) -> tuple[Any, Any, Memory]:
    """Runs the tasks of one replica; gradients made in the rounds of a loop are summed in them."""
    listed = make(state, pending, shards, rows)
    run = partial(_run, group.communicator, listed)
    if any(task.reduction.collective.rounds > 1 for task in listed.messages):
        run = fused_loops(run)
    return run(state, pending, shards, memory, rows)


def _run(
    comm: Communicator,
    listed: TaskList,
    state: Any,
    pending: PyTree,
    shards: PyTree,
    memory: Memory,
    rows: PyTree,
) -> tuple[Any, Any, Memory]:
    """Traces the tasks in order, each message under a name by which `fddp.audit` finds it.

    The order of the list is not the order in which XLA runs: it starts a message as soon as the
    gradients of its bucket exist, though the list has the whole backward pass before.

    If a hook's sum is not finite, all hooks keep their previous memory. A hook that
    remembered an overflow would never be finite again, and an optimizer that skips such a step does
    not use the other hooks' sums either.
    """
    values = listed.enter(state, pending, shards, rows)
    previous = dict[int | None, Any](enumerate(drop_replica_dim(memory)))
    current = dict(previous)
    sums = list[Value]()
    waited = 0  # how many of the sums a message has waited for
    all_bytes = list[Any]()
    for task in listed.tasks:
        inputs = (values[name] for name in task.reads)
        if not isinstance(task, Communicate):
            values.update(zip(task.writes, task.run(*inputs)))
            continue
        message, *more = inputs
        flags = next(iter(more), None)
        with jax.named_scope(scope(task.name)):
            # Without a barrier, ranks whose programs differ would add unrelated messages: XLA
            # drops the sum of a constant, such as the zeros of a bucket that a rank's branch
            # leaves unused, and it sends first what is ready first. On GPUs late buckets would
            # leave first. A sum inside a loop has the loop's place, and the same program on all
            # ranks.
            if comm.size > 1 and task.reduction.collective.rounds == 1 and not comm.in_lane:
                awaited_sums = sums[waited:]
                barred = (message, *(values[name] for name in awaited_sums))
                message, *barred_sums = jax.lax.optimization_barrier(barred)
                values.update(zip(awaited_sums, barred_sums))
                waited = len(sums)
            index = task.reduction.memory
            hook_memory = current.get(index, ())
            total, hook_memory, nbytes = summed(comm, task.reduction, flags, message, hook_memory)
            values[task.writes[0]] = total
            if index in previous:
                current[index] = hook_memory
        sums.append(task.writes[0])
        all_bytes.append(nbytes)
        if BYTES in task.writes:
            values[BYTES] = jnp.stack(all_bytes)
    hooked = [task for task in listed.messages if task.reduction.hooked]
    finite = all_finite(values[task.writes[0]] for task in hooked)
    new_memory = jax.tree.map(
        partial(jnp.where, finite), [current[k] for k in previous], list(previous.values())
    )
    return *listed.leave(values), add_replica_dim(tuple(new_memory))


def scope(name: str) -> str:
    """The name of a message inside a compiled program."""
    return name.replace(" ", "")


def _fused(group: Group, pieces: Pieces, donate: bool) -> Runner:
    return in_one_program(group, partial(in_one_piece, group.placement, pieces), donate)


fused = Schedule("fused", _fused, one_program=True, cuts=False)
