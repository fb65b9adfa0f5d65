"""Traces the gradients of one rank's first batch, and reads facts off their program.

These are the ready order of the gradients, the unused parameters, and the loops that make gradients
layer by layer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fddp.buckets import Travelling
from fddp.comm import described, trace
from fddp.jax_internals import ClosedJaxpr, unbound_axis, without_jit
from fddp.jaxpr import (
    collectives,
    first_uses,
    has_64_bits,
    in_slices,
    ready_order,
    text_digest,
    touched_rows,
    wiring,
)
from fddp.losses import Sums, contribute, reached, unjoined
from fddp.schedules import SCHEDULES, Schedule, described_exchanges, forms_of, shorter_loops, staged
from fddp.step.agreed import Common, Seen
from fddp.step.checks import check_batch
from fddp.step.combinations import COLLECTIVES, refuse
from fddp.step.first_rows import digest
from fddp.step.held import check_held
from fddp.step.partitions import partitions_of
from fddp.step.planned import provisional_plan
from fddp.step.replica import Replica, no_sums
from fddp.step.state import TrainState, check_state, form_of


class FirstBatch(NamedTuple):
    """What one rank reads off its first batch and the gradients' program."""

    common: Common
    schedule: Schedule
    lines: Sequence[str]
    """More lines to compare: the loss's collectives that become tasks."""
    seen: Seen


def look(replica: Replica, state: TrainState, batch: PyTree) -> FirstBatch:
    """Checks the first state and batch, and reads the gradients' program."""
    check_state(state)
    check_batch(replica, batch)
    state = check_held(replica, state)
    chosen = replica.chosen(state.params)
    program, outputs = _gradients(replica, state, batch)
    schedule = _schedule(replica, program)
    partitions = partitions_of(replica, state.params, program, schedule)
    leaves = range(len(jax.tree.leaves(state.params)))
    units = {i: partitions.get(i, [Travelling(i)]) for i in leaves}
    sliced = program
    if partitions and schedule.cuts:
        sliced = _in_slices(replica, program, chosen, partitions)
    several = replica.group.processes > 1
    sums_in_loops = several and schedule.one_program and bool(partitions)
    seen = Seen(
        order=_order(replica, sliced, [unit for i in chosen for unit in units[i]]),
        # The program's inputs are the step number, the parameters, and the rest of the state.
        uses={
            (unit.leaf, unit.slice): use
            for unit, use in zip(chain(*units.values()), first_uses(sliced)[1:])
        },
        has_path=dict(zip(chosen, paths(replica, state, batch))),
        touched=dict(zip(chosen, touched_rows(program))),
        rows=digest(unjoined(batch)) if several else b"",
        wiring=wiring(program) if several else b"",
        program=text_digest(program) if sums_in_loops else "",
    )
    common = Common(
        state=jax.tree.map(form_of, state),
        chosen=chosen,
        rows=forms_of(batch),
        outputs=outputs,
        collectives=tuple(sorted(collectives(program))),
    )
    lines = _lines(replica, program, schedule, len(chosen))
    return FirstBatch(common, schedule, lines, seen)


def described_batch(replica: Replica, batch: PyTree, call: str, first: FirstBatch) -> list[str]:
    """Lists the facts that must be equal on all ranks, one per line."""
    state = first.common.state
    return [
        f"call {call}",
        repr(replica.options),
        f"schedule {first.schedule.name}",
        f"plan {provisional_plan(replica, state.params).digest}",
        f"replicas per host in sums: {replica.group.transport.local or 'all'}",
        *described("batch", batch),
        *described("parameter", state.params),
        *described("model_state", state.model_state),
        *described("rng", state.rng),
        *described("loss and aux", first.common.outputs),
        *first.lines,
    ]


def _lines(replica: Replica, program: ClosedJaxpr, schedule: Schedule, gradients: int) -> list[str]:
    lines = []
    if schedule.cuts:
        lines += described_exchanges(replica.group.placement, program, gradients)
    return lines


def paths(replica: Replica, state: TrainState, batch: PyTree) -> tuple[bool, ...]:
    """Marks the trained leaves with a path to the loss; all, without `find_unused_parameters`."""
    marks: list[tuple[bool, ...]] = []

    def program(state: TrainState, batch: PyTree) -> None:
        marks.append(marked_paths(replica, state, _part(replica, batch)))

    trace(replica.group.placement, program, state, batch)
    return marks[0]


def _gradients(replica: Replica, state: TrainState, batch: PyTree) -> tuple[ClosedJaxpr, Any]:
    """Traces the gradients of one micro-batch; also returns shapes and dtypes of loss and aux."""
    traced_replica = replica.way.traced(replica)

    def program(state: TrainState, batch: PyTree) -> tuple[Any, Any]:
        sums = contribution(traced_replica, state, _part(replica, batch))
        return sums.grads, (sums.loss, sums.aux)

    try:
        closed, (_, outputs) = trace(traced_replica.group.placement, program, state, batch)
        return closed, outputs
    except NameError as error:
        axis = unbound_axis(error)
        if axis is None:
            raise
    # Raised outside `except`, so that the traceback does not show JAX's error first.
    if traced_replica is not replica:
        refuse(replica.asked | {COLLECTIVES: f"a loss that speaks over the axis {axis!r}"})
    raise ValueError(
        f"the loss has a collective over the axis {axis!r}; backend "
        f"{replica.group.backend!r} has the axis {replica.group.axis_name!r}."
    )


def _in_slices(
    replica: Replica,
    program: ClosedJaxpr,
    chosen: Sequence[int],
    partitions: Mapping[int, Sequence[Travelling]],
) -> ClosedJaxpr:
    """Rewrites the program to read parameters and make gradients in slices, as its loops do."""
    placement = replica.group.placement
    slices = {i: tuple(x.slice for x in units if x.slice) for i, units in partitions.items()}
    inputs = {1 + i: bounds for i, bounds in slices.items()}
    run, forms = in_slices(
        program, inputs, {chosen.index(i): bounds for i, bounds in slices.items()}
    )
    closed, _ = trace(placement, run, *forms)
    return shorter_loops(placement, closed, {}, dict.fromkeys(range(len(forms)), 1))[0]


def _order(replica: Replica, program: ClosedJaxpr, units: Sequence[Travelling]) -> list[Travelling]:
    """Sorts leaves and slices by readiness, or in reverse with `order="reverse"`."""
    if replica.options.order == "reverse":
        return list(units[::-1])
    return [units[k] for k in ready_order(program, len(units))]


def _part(replica: Replica, batch: PyTree) -> Any:
    """Cuts the first micro-batch from a batch."""
    return jax.tree.map(lambda x: x[: x.shape[0] // replica.micro_batches], batch)


def _schedule(replica: Replica, program: ClosedJaxpr) -> Schedule:
    """Returns the schedule of the options, or for "auto" the one that overlaps on this backend."""
    group = replica.group
    schedule = replica.options.schedule
    kinds = collectives(program)
    if kinds:
        refuse(
            replica.asked | {COLLECTIVES: f"collectives in the loss ({', '.join(sorted(kinds))})"}
        )
    # A stage is traced again, without the loss's context of 64 bits.
    wide = not jax.config.read("jax_enable_x64") and has_64_bits(program)
    if schedule != "auto":
        if wide and SCHEDULES[schedule].cuts:
            raise ValueError(
                f"the loss computes in 64 bits, by jax.enable_x64 inside of it, and schedule="
                f"{schedule!r} cuts it where that is lost: give schedule='fused' or 'after', or "
                "set JAX_ENABLE_X64 for the whole script."
            )
        return SCHEDULES[schedule]
    # Over MPI a replica computes on JAX's default device.
    on_cpu = not group.placement.overlaps
    on_cpu = on_cpu and (group.placement.on_mesh or jax.default_backend() == "cpu")
    cpu_hosts = group.processes > 1 and group.size == group.processes and on_cpu
    uncut = kinds or wide or group.placement.other_axes or without_jit() or replica.way.replicas
    if cpu_hosts and not uncut and group.transport.in_lane is None:
        return staged
    return replica.way.schedule


def contribution(replica: Replica, state: TrainState, micro_batch: PyTree) -> Sums:
    """Computes the weighted sums of one micro-batch."""
    return contribute(*_arguments(replica, state, micro_batch)).sums


def marked_paths(replica: Replica, state: TrainState, micro_batch: PyTree) -> tuple[bool, ...]:
    """Marks the trained leaves with a path to the loss; all, without
    `find_unused_parameters`."""
    if not replica.options.find_unused_parameters:
        return (True,) * len(replica.chosen(state.params))
    return reached(*_arguments(replica, state, micro_batch))


def _arguments(replica: Replica, state: TrainState, micro_batch: PyTree) -> tuple[Any, ...]:
    """Returns the arguments of `contribute` for one micro-batch."""
    start = no_sums(state)
    objective = partial(replica.objective, unit=replica.unit)
    return (
        objective,
        replica.chosen(state.params),
        state.params,
        start,
        replica.key(state, start),
        micro_batch,
    )
