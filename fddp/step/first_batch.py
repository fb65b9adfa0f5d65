"""Traces the gradients of one rank's first batch, and reads facts off their program.

These are the ready order of the gradients, the unused parameters, and the loops that make gradients
layer by layer.
"""

from typing import Any

import jax
from jaxtyping import PyTree

from fddp.buckets import SentLeaf
from fddp.comm import described, forms_of, trace
from fddp.jax_internals import ClosedJaxpr, ordered, trace_settings, unbound_axis
from fddp.jaxpr import (
    collectives,
    first_uses,
    ready_order,
    straighten,
    text_digest,
    touched_rows,
    wiring,
)
from fddp.losses import Pending, contribute, reached, unjoined
from fddp.step.agreed import Common, Seen, digest_of_rows
from fddp.step.bucket_plan import provisional_plan, sent_in_rounds
from fddp.step.checks import check_batch, check_trained
from fddp.step.combinations import COLLECTIVES, refuse
from fddp.step.first_trace import FirstTrace
from fddp.step.replica import Replica, no_sums
from fddp.step.state import TrainState, check_state, form_of
from fddp.step.state_layout import check_layout


def look(replica: Replica, state: TrainState, batch: PyTree) -> tuple[Common, Seen]:
    """Checks the first state and batch, and reads the gradients' program."""
    check_state(state)
    check_batch(replica, batch)
    state = check_layout(replica, state)
    chosen = replica.chosen(state.params)
    check_trained(state.params, chosen)
    first, results = _gradients(replica, state, batch)
    program = straighten(first.program)
    _check_effects(replica, program)
    in_rounds = sent_in_rounds(replica, state.params, program)
    order = list(chosen[::-1])
    if replica.options.order != "reverse":
        order = [chosen[k] for k in ready_order(program, len(chosen))]
    several = replica.group.processes > 1
    seen = Seen(
        order=[in_rounds.get(i, SentLeaf(i)) for i in order],
        # The program's inputs are the step number, the parameters, and the rest of the state.
        uses=first_uses(program)[1:],
        has_path=dict(zip(chosen, paths(replica, state, batch))),
        touched=dict(zip(chosen, touched_rows(program))),
        rows=digest_of_rows(unjoined(batch)) if several else b"",
        wiring=wiring(program) if several else b"",
        program=text_digest(program) if several and in_rounds else "",
    )
    common = Common(
        state=jax.tree.map(form_of, state),
        chosen=chosen,
        rows=forms_of(batch),
        outputs=(results.sums.loss, results.sums.aux),
        collectives=tuple(sorted(collectives(program))),
        first=first,
    )
    return common, seen


def described_batch(
    replica: Replica, batch: PyTree, call: str, first: tuple[Common, Seen]
) -> list[str]:
    """Lists the facts that must be equal on all ranks, one per line."""
    common, _ = first
    state = common.state
    return [
        f"call {call}",
        repr(replica.options),
        f"plan {provisional_plan(replica, state.params).digest}",
        f"replicas per host in sums: {replica.group.transport.local or 'all'}",
        *described("batch", batch),
        *described("parameter", state.params),
        *described("model_state", state.model_state),
        *described("rng", state.rng),
        *described("loss and aux", common.outputs),
    ]


def paths(replica: Replica, state: TrainState, batch: PyTree) -> tuple[bool, ...]:
    """Marks the trained leaves with a path to the loss; all, without `find_unused_parameters`."""
    if not replica.options.find_unused_parameters:
        return (True,) * len(replica.chosen(state.params))
    marks: list[tuple[bool, ...]] = []

    def program(state: TrainState, batch: PyTree) -> None:
        micro_batch = jax.tree.map(lambda x: x[: x.shape[0] // replica.micro_batches], batch)
        marks.append(reached(*replica.arguments(state, no_sums(state), micro_batch)))

    trace(replica.group.placement, program, state, batch)
    return marks[0]


def _gradients(replica: Replica, state: TrainState, batch: PyTree) -> tuple[FirstTrace, Pending]:
    """Traces the contribution of one micro-batch; also returns shapes and dtypes of its results."""
    traced_replica = replica.strategy.gradient_replica(replica)

    def program(state: TrainState, micro_batch: PyTree) -> Pending:
        return contribute(*traced_replica.arguments(state, no_sums(state), micro_batch))

    def part(x: Any) -> jax.ShapeDtypeStruct:
        kind = jax.typeof(x)
        shape = (kind.shape[0] // replica.micro_batches, *kind.shape[1:])
        return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)

    arguments = state, jax.tree.map(part, batch)
    try:
        closed, results = trace(traced_replica.group.placement, program, *arguments)
        trees = jax.tree.structure(arguments), jax.tree.structure(results)
        return FirstTrace(closed, *trees, trace_settings()), results
    except NameError as error:
        axis = unbound_axis(error)
        if axis is None:
            raise
    # Raised outside `except`, so that the traceback does not show JAX's error first.
    if traced_replica is not replica:
        refuse(replica.features | {COLLECTIVES: f"a loss with collectives over the axis {axis!r}"})
    raise ValueError(
        f"the loss has a collective over the axis {axis!r}; backend "
        f"{replica.group.backend!r} has the axis {replica.group.axis_name!r}."
    )


def _check_effects(replica: Replica, program: ClosedJaxpr) -> None:
    """Raises ValueError for effects or collectives that the step's program cannot have."""
    placement = replica.group.placement
    several = placement.on_mesh and placement.axis_size * placement.devices_of_replica > 1
    if several and not replica.strategy.replicas and (effects := ordered(program)):
        raise ValueError(
            f"the loss has effects in an order ({', '.join(effects)}), which JAX runs on one "
            "device only: use jax.lax.psum or pmean over group.axis_name for mpi4jax's calls, or "
            "fddp.init('mpi'); leave ordered=True out of prints and callbacks."
        )
    if kinds := ", ".join(sorted(collectives(program))):
        refuse(replica.features | {COLLECTIVES: f"collectives in the loss ({kinds})"})
