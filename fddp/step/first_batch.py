"""Reads one rank's first batch: the gradients' program, the order of readiness in it, and what may be unused."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from fddp.buckets import Slice, Travelling
from fddp.comm import described, trace
from fddp.jax_internals import ClosedJaxpr, without_jit
from fddp.jaxpr import (
    collectives,
    first_uses,
    in_slices,
    made_row_by_row,
    places,
    read_in,
    ready_order,
    stacks,
    text_digest,
    touched_rows,
)
from fddp.losses import unjoined
from fddp.schedules import Schedule, after, described_exchanges, eager, fused, held, shorter_loops, staged, unordered
from fddp.step.checks import check_batch
from fddp.step.combinations import COLLECTIVES, refuse
from fddp.step.held import check_held
from fddp.step.options import name_of
from fddp.step.replica import Replica
from fddp.step.same_rows import digest
from fddp.step.state import TrainState, check_state

SCHEDULES: dict[str, Schedule] = {
    "fused": fused,
    "held": held,
    "unordered": unordered,
    "after": after,
    "staged": staged,
    "eager": eager,
}
ONE_PROGRAM = (fused, held, unordered)


class Seen(NamedTuple):
    """The facts that one rank reads off the gradients' program."""

    state: TrainState
    """The state as gradients go by it, with forms of whole arrays in place of shards."""
    chosen: tuple[int, ...]
    """The trained leaves."""
    order: Sequence[Travelling]
    """The same, or slices of them, as their gradients become ready."""
    uses: Mapping[tuple[int, Slice | None], int]
    """The place in the forward pass at which each leaf, or slice of one, is first used."""
    read_in: Mapping[int, np.dtype]
    """The dtype of fewer bits in which the loss reads a leaf, for each leaf that it reads so."""
    reach: tuple[Sequence[bool], Sequence[int]]
    """Marks of the trained leaves that have a path to the loss, and the number of rows that each gradient touches."""
    schedule: Schedule
    told: Any
    """The forms of loss and aux."""
    collectives: tuple[str, ...]
    """The kinds of collectives that the loss holds."""
    spoken: Sequence[str]
    """Lines on these, where they travel between stages, and on the order in which parameters are gathered."""
    digest: bytes
    """The digest of this rank's first rows."""
    program: str
    """The digest of the gradients' program, where sums run in its loops; it must be the same on all ranks."""


def look(replica: Replica, state: TrainState, batch: Any) -> Seen:
    """Checks the first state and the first batch, and reads the gradients' program.

    Args:
      replica: what one replica does.
      state: the first state.
      batch: this process's rows, as programs take them.

    Returns:
      What is seen.

    Raises:
      ValueError: the state or the batch does not fit.
      TypeError: the loss returns something else than promised.
    """
    check_state(state)
    check_batch(replica, batch)
    state = check_held(replica, state)
    chosen = replica.chosen(state.params)
    program, told = _gradients(replica, state, batch)
    schedule = _schedule(replica, program)
    parts = _parts(replica, state.params, program, schedule)
    cut = _in_slices(replica, program, chosen, parts) if parts and cuts(schedule) else program
    each = [parts.get(i, [Travelling(i)]) for i in range(len(jax.tree.leaves(state.params)))]
    travelling = [one for i in chosen for one in each[i]]
    exchanges = described_exchanges(replica.group.placement, program, len(chosen)) if cuts(schedule) else []
    # The program says when a parameter is gathered.
    again = replica.options.reshard_after_forward and replica.group.processes > 1
    gathers = [f"program, with reshard_after_forward, {text_digest(program)}"] if again else []
    touched = [min(count, np.iinfo(np.int32).max) for count in touched_rows(program)[: len(chosen)]]
    return Seen(
        state=state,
        chosen=chosen,
        order=_order(replica, cut, travelling),
        # The state comes first: the number of the step, then the parameters.
        uses={(one.leaf, one.slice): use for one, use in zip(chain(*each), first_uses(cut)[1:])},
        read_in=_read_in(program, chosen),
        reach=(paths(replica, state, batch), touched),
        schedule=schedule,
        told=told,
        collectives=tuple(sorted(collectives(program))),
        spoken=exchanges + gathers,
        digest=digest(unjoined(batch)) if replica.group.processes > 1 else b"",
        program=text_digest(program) if parts and schedule in ONE_PROGRAM and replica.group.processes > 1 else "",
    )


def cuts(schedule: Schedule) -> bool:
    """Whether a schedule cuts the backward pass, so that a message leaves before the whole pass is done."""
    return schedule not in (*ONE_PROGRAM, after)


def described_batch(replica: Replica, batch: Any, call: str, seen: Seen) -> list[str]:
    """Lines that must be equal on all ranks.

    Args:
      replica: what one replica does.
      batch: this process's rows.
      call: what the user called.
      seen: what is seen in them.

    Returns:
      The lines.
    """
    state = seen.state
    return [
        f"call {call}",
        repr(replica.options),
        f"schedule {name_of(seen.schedule)}",
        f"plan {replica.provisional_plan(state.params).digest}",
        *replica.described_groups(state.params),
        f"group.local {replica.group.local}",
        *described("batch", batch),
        *described("parameter", state.params),
        *described("model_state", state.model_state),
        *described("rng", state.rng),
        *described("loss and aux", seen.told),
        *seen.spoken,
    ]


def paths(replica: Replica, state: TrainState, batch: Any) -> tuple[bool, ...]:
    """Marks the trained leaves that have a path to the loss; all of them, where nobody asks."""
    found: list[tuple[bool, ...]] = []

    def program(state: TrainState, batch: Any) -> None:
        found.append(replica.paths(state, _part(replica, batch)))

    trace(replica.group.placement, program, state, batch)
    return found[0]


def casts(replica: Replica, state: TrainState, batch: Any) -> Mapping[int, np.dtype]:
    """The dtype of fewer bits in which the loss of a batch reads a leaf, for each leaf that it reads so."""
    return _read_in(_gradients(replica, state, batch)[0], replica.chosen(state.params))


def _read_in(program: ClosedJaxpr, chosen: Sequence[int]) -> dict[int, np.dtype]:
    found = read_in(program)[1:]  # the number of the step comes first, then the parameters
    return {i: dtype for i in chosen if (dtype := found[i]) is not None}


def _gradients(replica: Replica, state: TrainState, batch: Any) -> tuple[ClosedJaxpr, Any]:
    """The gradients of one micro-batch of one replica as a program, and the form of loss and aux."""
    one = replica.way.one(replica)

    def program(state: TrainState, batch: Any) -> tuple[Any, Any]:
        sums = one.contribution(state, _part(replica, batch))
        return sums.grads, (sums.loss, sums.aux)

    try:
        closed, (_, told) = trace(one.group.placement, program, state, batch)
        return closed, told
    except NameError as error:
        unbound = re.search(r"unbound axis name: ([^.\s]+)", str(error))
        if unbound is None:
            raise
    # Not in there: JAX's own words would be shown above these.
    if one is not replica:
        refuse(replica.asked | {COLLECTIVES: f"a loss that speaks over the axis {unbound[1]!r}"})
    raise ValueError(
        f"the loss has a collective over the axis {unbound[1]!r}; backend {replica.group.backend!r} has the axis "
        f"{replica.group.axis_name!r}."
    )


def _parts(replica: Replica, params: Any, program: ClosedJaxpr, schedule: Schedule) -> dict[int, list[Travelling]]:
    """Finds what travels of each leaf whose gradient leaves part by part, as a loop makes it.

    A schedule that cuts sends slices. In one program a whole leaf is sent, a part in each round of the loop.
    """
    of_use = replica.group.placement.overlaps or replica.options.reshard_after_forward
    together = schedule in ONE_PROGRAM and of_use and replica.group.size > 1
    if replica.options.order == "reverse" or not (cuts(schedule) or together):
        return {}
    chosen = replica.chosen(params)
    found = made_row_by_row(program) if together else stacks(program)
    loops = {chosen[k]: stack for k, stack in found.items() if k < len(chosen)}
    return (
        replica.rounds(params, loops, dict(zip(chosen, places(program)))) if together else replica.slices(params, loops)
    )


def _in_slices(
    replica: Replica, program: ClosedJaxpr, chosen: Sequence[int], sliced: Mapping[int, Sequence[Travelling]]
) -> ClosedJaxpr:
    """The same program, which is given slices, and makes slices of gradients, as its loops use and make them."""
    placement = replica.group.placement
    bounds = {i: tuple(one.slice for one in some if one.slice) for i, some in sliced.items()}
    inputs = {1 + i: some for i, some in bounds.items()}
    run, forms = in_slices(program, inputs, {chosen.index(i): some for i, some in bounds.items()})
    closed, _ = trace(placement, run, *forms)
    return shorter_loops(placement, closed, {}, dict.fromkeys(range(len(forms)), 1))[0]


def _order(replica: Replica, program: ClosedJaxpr, travelling: Sequence[Travelling]) -> list[Travelling]:
    """Orders what travels as the program makes it ready, or as the user asks."""
    if replica.options.order == "reverse":
        return list(travelling[::-1])
    return [travelling[k] for k in ready_order(program, len(travelling))]


def _part(replica: Replica, batch: Any) -> Any:
    """The rows of one micro-batch."""
    return jax.tree.map(lambda x: x[: x.shape[0] // replica.micro_batches], batch)


def _schedule(replica: Replica, program: ClosedJaxpr) -> Schedule:
    """The schedule that was asked for, or the one that overlaps here."""
    group = replica.group
    asked = replica.options.schedule
    own = collectives(program)
    if own:
        refuse(replica.asked | {COLLECTIVES: f"collectives in the loss ({', '.join(sorted(own))})"})
    if callable(asked):
        return asked
    if asked != "auto":
        return SCHEDULES[asked]
    cpu_hosts = group.processes > 1 and group.size == group.processes and jax.default_backend() == "cpu"
    whole = own or group.placement.other_axes or without_jit()
    return staged if cpu_hosts and not whole else replica.way.schedule
