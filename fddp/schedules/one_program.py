"""Runs all tasks in one XLA program, whose scheduler overlaps where it can."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fddp.comm import REPLICATED, Communicator, Group, add_replica_dim, drop_replica_dim
from fddp.hooks import Memory, all_finite, summed
from fddp.jax_internals import compile_to_read
from fddp.jaxpr import fused_loops
from fddp.schedules.compiling import compiling, first_call
from fddp.schedules.footprint import Footprint
from fddp.schedules.lists import in_one_piece
from fddp.schedules.pieces import MakeList, Pieces, Runner
from fddp.schedules.planned_memory import of_one_program
from fddp.schedules.tasks import BYTES, Communicate, TaskList, Value

# (earlier sums, how many of them a message has waited for, whether the next message is the last) → those that XLA must
# have before that message leaves, and that are used only then.
Hold: TypeAlias = Callable[[list[Value], int, bool], list[Value]]


def fused(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs one XLA program with an all-reduce per bucket; XLA's scheduler overlaps where it can (GPU, TPU).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """
    return in_one_program(group, partial(in_one_piece, group.placement, pieces), donate)


def held(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs the same program as `fused`, in which all updates wait until the last message can leave.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """
    return _program(group, partial(in_one_piece, group.placement, pieces), donate, _until_the_last)


def unordered(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs the same program as `fused`, whose all-reduces XLA's scheduler puts in the order that it finds best.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """
    return _program(group, partial(in_one_piece, group.placement, pieces), donate, _at_any_time)


def in_one_program(group: Group, make: MakeList, donate: bool) -> Runner:
    """Traces the tasks of a list, in order, into one program.

    Args:
      group: the replicas.
      make: makes the list.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """
    return _program(group, make, donate, _in_turn)


def _program(group: Group, make: MakeList, donate: bool, hold: Hold) -> Runner:
    """Traces a list into one program, in which `hold` says what a message waits for."""
    own = group.placement.per_replica
    specs = (REPLICATED, own, own, own, own), (REPLICATED, own, own)
    donated = (0, 2, 3) if donate else ()
    program = group.placement.program(partial(traced, group, make, hold), *specs, donate=donated)
    launch = first_call(program, "the step", partial(compiling, group))

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        given = (state, pending, shards, memory, group.placement.feed(rows))
        try:
            result = launch(*given)
        except BaseException:
            program.lower(*given)  # a step that cannot be traced has sent nothing, and fails here once more
            group.recovery.sends()
            raise
        group.recovery.sends()
        return jax.block_until_ready(result) if group.placement.shares_cores else result

    def lower(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> jax.stages.Lowered:
        return program.lower(state, pending, shards, memory, group.placement.feed(rows))

    def footprint(*given: Any) -> Footprint | None:
        return of_one_program(compile_to_read(lower(*given)))

    # A program inside of another one cannot have options for the compiler.
    inside = program.__wrapped__ if group.placement.on_mesh else None  # pyright: ignore[reportAttributeAccessIssue]
    return Runner(run, lower, None, make, footprint, inside=inside)


def traced(
    group: Group, make: MakeList, hold: Hold, state: Any, pending: Any, shards: Any, memory: Memory, rows: Any
) -> tuple[Any, Any, Memory]:
    """Runs the tasks of one replica; the sum of what a loop makes in its rounds runs in these rounds."""
    listed = make(state, pending, shards, rows)
    run = partial(_run, group.communicator, listed, hold)
    in_rounds = any(task.reduction.rounds > 1 for task in listed.messages)
    return (fused_loops(run) if in_rounds else run)(state, pending, shards, memory, rows)


def _run(
    comm: Communicator, listed: TaskList, hold: Hold, state: Any, pending: Any, shards: Any, memory: Memory, rows: Any
) -> tuple[Any, Any, Memory]:
    """Runs the tasks in order, each message under a name by which `fddp.audit` finds it.

    If one hook's sum is not finite, all hooks keep the memory that they had before. One that remembered an overflow
    would never be finite again; and an optimizer that skips such a step does not use the other hooks' sums either.
    """
    values = listed.enter(state, pending, shards, rows)
    before = dict[int | None, Any](enumerate(drop_replica_dim(memory)))
    after = dict(before)
    sums = list[Value]()
    waited = 0  # how many of them a message has waited for
    last = next((task for task in reversed(listed.messages) if task.reduction.rounds == 1), None)
    sent = list[Any]()
    for task in listed.tasks:
        read = [values[name] for name in task.reads]
        if not isinstance(task, Communicate):
            values.update(zip(task.writes, task.run(*read)))
            continue
        message = read[0]
        said = read[1] if len(read) > 1 else None
        with jax.named_scope(scope(task.name)):
            # A barrier hides what the message is from XLA, and keeps the order. XLA drops the sum of a constant (the
            # zeros of a bucket that this rank's branch leaves unused, say), and sends what is ready first: ranks whose
            # programs differ would then add what does not belong together. On GPUs, too, late buckets would go first.
            # What is summed in a loop has the loop's place, and all ranks have the same program there.
            if comm.size > 1 and task.reduction.rounds == 1:
                behind = hold(sums, waited, task is last)
                message, *held = jax.lax.optimization_barrier((message, *(values[name] for name in behind)))
                values.update(zip(behind, held))
                waited = len(sums)
            place = task.reduction.memory
            mine = after.get(place, ())
            values[task.writes[0]], mine, nbytes = summed(comm, task.reduction, said, message, mine)
            after |= {place: mine} if place in before else {}
        sums.append(task.writes[0])
        sent.append(nbytes)
        if BYTES in task.writes:
            values[BYTES] = jnp.stack(sent)
    hooked = [values[task.writes[0]] for task in listed.messages if task.reduction.apply]
    # No array of them: it may have no elements, which the compiler of JAX 0.11 cannot take into a shard_map.
    finite = reduce(jnp.logical_and, map(all_finite, hooked), jnp.bool_(True))
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    return *listed.leave(values), add_replica_dim(tuple(new[place] for place in range(len(memory))))


def _in_turn(sums: list[Value], waited: int, last: bool) -> list[Value]:
    """Lets messages leave one after the other."""
    del last
    return sums[waited:]


def _until_the_last(sums: list[Value], waited: int, last: bool) -> list[Value]:
    """Lets messages leave one after the other, and no sum be used before the last message leaves.

    Updates that are there earlier are put by XLA, on GPUs before Hopper, where the backward pass would hide a message.
    """
    return sums if last else sums[waited:]


def _at_any_time(sums: list[Value], waited: int, last: bool) -> list[Value]:
    """Lets a message leave whenever XLA likes."""
    del sums, waited, last
    return []


def scope(name: str) -> str:
    """The name of a message inside a compiled program."""
    return name.replace(" ", "")
