"""Traces a step into one XLA program, which overlaps messages with computation.

On GPUs XLA starts the sums early. On CPUs `fddp.program` places their starts and dones.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.buckets import Messages
from fddp.comm import (
    REPLICATED,
    Communicator,
    Group,
    add_replica_dim,
    as_program,
    drop_replica_dim,
)
from fddp.hooks import Memory, all_finite, summed
from fddp.jaxpr import fused_loops
from fddp.program import received_behind_loops
from fddp.step.schedules.compile_reports import report_first_call
from fddp.step.schedules.pieces import Pieces, Runner, Send, StepInputs, StepOutputs
from fddp.step.schedules.timeline import timeline_of


def overlap(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Makes a step whose messages leave as soon as they are ready.

    If `donate`, the program may reuse the state's memory.
    """
    placement = group.placement
    step = partial(traced, group, pieces)
    # The result has neither pending sums nor rows.
    donated = (0, 2, 3) if donate else ()
    per_replica = placement.per_replica
    in_specs = (REPLICATED, *[per_replica] * 4)
    out_specs = (REPLICATED, per_replica, per_replica)
    program: Any = placement.program(step, in_specs, out_specs, donate=donated)
    launch = report_first_call(program, "the step", group)

    def run(inputs: StepInputs) -> StepOutputs:
        result = StepOutputs(*launch(*fed(group, inputs)))
        if placement.shares_cores:
            jax.block_until_ready(result)
        return result

    def lower(inputs: StepInputs) -> jax.stages.Lowered:
        return program.lower(*fed(group, inputs))

    def inside(inputs: StepInputs) -> StepOutputs:
        # A program inside another one cannot have compiler options.
        return StepOutputs(*program.__wrapped__(*inputs))

    ordered = placement.on_mesh or group.transport.in_lanes
    names = tuple(reduction.name for reduction in pieces.reductions)
    times = getattr(program, "times", None)  # between CPU processes
    timeline = times and (lambda: timeline_of(*times()))
    return Runner(run, lower, messages=names, inside=inside if ordered else None, timeline=timeline)


def after(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Makes a step whose messages leave when the whole backward pass has ended."""
    wait = _behind_all if group.communicator.in_lane else jax.lax.optimization_barrier

    def run(state: Any, pending: Any, shards: Any, rows: Any, send: Send) -> tuple[Any, Any]:
        def send_later(messages: Messages) -> Any:
            return send(replace(messages, arrays=wait(messages.arrays)))

        return pieces.run(state, pending, shards, rows, send_later)

    return overlap(group, pieces._replace(run=run), donate)


def _behind_all(arrays: Any) -> Any:
    """Multiplies arrays by 1.0, which XLA:CPU knows when all of them exist; it drops barriers."""
    is_float = lambda x: x.size and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    floats = list(filter(is_float, jax.tree.leaves(arrays)))
    if not floats:
        return arrays
    ends = jnp.stack([x.ravel()[k].astype(jnp.float32) for x in floats for k in (0, -1)])
    one = jnp.where(jnp.any(jnp.isnan(ends) & jnp.isinf(ends)), 0.0, 1.0)
    return jax.tree.map(lambda x: x * one.astype(x.dtype) if is_float(x) else x, arrays)


def fed(group: Group, inputs: StepInputs) -> StepInputs:
    """Places the rows for the program."""
    rows = group.placement.retained(inputs.rows)
    return inputs._replace(rows=group.placement.as_program_rows(rows))


def traced(group: Group, pieces: Pieces, *inputs: Any) -> tuple[Any, Any, Memory]:
    """Runs the step of one replica; gradients made in the rounds of a loop are summed in them.

    `inputs` are those of `StepInputs`, in order.
    """
    run = partial(_run, group.communicator, pieces)
    in_rounds = any(reduction.rounds > 1 for reduction in pieces.reductions)
    if in_rounds or not group.communicator.in_lane:  # a lane traces its programs itself
        run = as_program(group.placement, run)
    if in_rounds:
        run = received_behind_loops(fused_loops(run))
    return run(*inputs)


def _run(
    comm: Communicator,
    pieces: Pieces,
    state: Any,
    pending: PyTree,
    shards: PyTree,
    memory: Memory,
    rows: PyTree,
) -> tuple[Any, Any, Memory]:
    """Traces the step, each message under a name by which `fddp.audit` finds it.

    A message stands behind the whole backward pass here, but XLA starts it as soon as the gradients
    of its bucket exist.

    If a hook's sum is not finite, all hooks keep their previous memory. A hook that
    remembered an overflow would never be finite again, and an optimizer that skips such a step does
    not use the other hooks' sums either.
    """
    previous = dict[int | None, Any](enumerate(drop_replica_dim(memory)))
    current = dict(previous)
    totals = list[Any]()
    waited = 0  # how many of the totals a message has waited for

    def send(messages: Messages) -> Any:
        nonlocal waited
        first = len(totals)
        nbytes = list[Any]()
        for reduction, message in zip(pieces.reductions[first:], messages.arrays):
            with jax.named_scope(scope(reduction.name)):
                # Without a barrier, ranks whose programs differ would add unrelated messages: XLA
                # drops the sum of a constant, such as the zeros of a bucket that a rank's branch
                # leaves unused, and it sends first what is ready first. On GPUs late buckets would
                # leave first. A sum inside a loop has the loop's place, and the same program on
                # all ranks.
                if comm.size > 1 and reduction.rounds == 1 and not comm.in_lane:
                    barred = jax.lax.optimization_barrier((message, *totals[waited:]))
                    message, totals[waited:] = barred[0], barred[1:]
                    waited = len(totals)
                hook_memory = current.get(reduction.memory, ())
                total, hook_memory, sent = summed(comm, reduction, message, hook_memory)
            totals.append(total)
            nbytes.append(sent)
            if reduction.memory in previous:
                current[reduction.memory] = hook_memory
        return replace(messages, arrays=tuple(totals[first:])), jnp.stack(nbytes)

    result, shards = pieces.run(state, drop_replica_dim(pending), shards, rows, send)
    finite = all_finite(x for r, x in zip(pieces.reductions, totals) if r.memory is not None)
    new_memory = jax.tree.map(
        partial(jnp.where, finite), [current[k] for k in previous], list(previous.values())
    )
    return result, shards, add_replica_dim(tuple(new_memory))


def scope(name: str) -> str:
    """The name of a message inside a compiled program."""
    return name.replace(" ", "")
