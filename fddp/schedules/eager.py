"""Returns from a step before its last sums arrive: they travel under the next step's forward pass.

An array of the state that is still being computed is a promise, and every reader waits for it. A
step that receives promises starts at once, and each of its stages waits for the arrays that it
reads. So no step reads a stale value.

Source: ByteScheduler (Peng et al., SOSP 2019), which crosses the border between steps in the same
way.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import Messages
from fddp.comm import MOST, Group
from fddp.hooks import plain_bytes
from fddp.jax_internals import Promise
from fddp.jaxpr import used_up
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.hook_memory import promised_memory, remembered
from fddp.schedules.launcher import Launcher, own_lane
from fddp.schedules.lists import forms_of, in_stages
from fddp.schedules.message_order import arrival_order, trailed
from fddp.schedules.pieces import Pieces, Runner, Schedule, StepInputs, StepOutputs
from fddp.schedules.programs import preparing
from fddp.schedules.queues import arranging, by_kind, heard
from fddp.schedules.staged import refuse_without_jit, staged
from fddp.schedules.tasks import TaskList
from fddp.schedules.values import Value

LATE = "communication"  # the queue of messages whose sums may arrive after the step has returned


def _eager(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Overlaps a step's last sums with the next step's forward pass.

    A step whose gradients are reduce-scattered runs staged: its gathers wait for its updates, and
    these wait for the last messages.

    If `donate`, updates may reuse the optimizer state's memory. A result that replaces an array of
    the state may be a `Promise`.
    """
    scattered = any(r.collective.kind == "reduce_scatter" for r in pieces.reductions)
    gathers_first = pieces.rounds[0].kind != "compute"
    return (staged if scattered or gathers_first else with_late_sums)(group, pieces, donate)


eager = Schedule("eager", _eager)


def with_late_sums(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs stages, messages and updates side by side, and returns after the last stage.

    Messages and updates have a thread each. The messages of all steps leave on one communicator of
    their own, in order. Where a process has several devices, or sums go over nodes first, the
    group has no such communicator, and a step returns after its last update.
    """
    lane, overlaps = own_lane(group)
    plain = _only_plain_sums(pieces)
    unconditional = all(
        r.collective.kind == "all_reduce" and r.asks is None for r in pieces.reductions
    )
    first_use = pieces.uses if unconditional and overlaps else {}
    pieces = _with_known_bytes(group, pieces) if plain else pieces
    make = partial(in_stages, group.placement, pieces, used=lambda k, count: k, late=arrival_order)
    queue_of = heard(group, by_kind)
    launcher = Launcher(group, lanes=(LATE,))
    # Prepared step → shapes of the results that it may promise, known once such a step has waited
    # for all of them.
    promised = dict[int, dict[Value, jax.ShapeDtypeStruct]]()
    donated = list[Any]()  # the last step may not have overwritten these when the next one starts

    arrange = arranging(lambda listed: queue_of, lambda listed: trailed(listed, first_use).tasks)
    prepare = preparing(lane, make, arrange, compiled, donate)

    def run(inputs: StepInputs) -> StepOutputs:
        refuse_without_jit("eager")
        memory = inputs.memory
        prepared, values = prepare(inputs)
        used = set(map(id, donated))
        if any(id(x) in used for x in values.values()):
            raise used_up()
        if launcher.failed():  # after the last step had returned, perhaps on this rank only
            group.journal.broken = group.processes > 1
            group.journal.refuse_broken()
        launcher.log.begin()
        routes = prepared.routes
        first = id(prepared) not in promised
        late = {name: Promise(form) for name, form in promised.get(id(prepared), {}).items()}
        names = [n for n in routes.results if n.replaces in values] if first and overlaps else []
        donated[:] = [values[name] for name in prepared.donated]
        launched = launcher.launch(prepared, values, memory=memory, late=late)
        results = launched.results
        job = launched.jobs.get(LATE) if late and memory else None
        memory = promised_memory(launched, job, memory) if job else remembered(launched, memory)
        if first:
            promised[id(prepared)] = forms_of({name: results[name] for name in names})
        launcher.log.end()
        return StepOutputs(*prepared.listed.leave(results), memory)

    def tasks(*arguments: Any) -> TaskList:
        return trailed(make(*arguments), first_use)

    return Runner(run, None, launcher.log.timeline, tasks, promises=True)


def _only_plain_sums(pieces: Pieces) -> bool:
    return not any(
        r.hooked or r.asks or r.collective.kind != "all_reduce" for r in pieces.reductions
    )


def _with_known_bytes(group: Group, pieces: Pieces) -> Pieces:
    """Reports the bytes of plain sums before they leave, so that no update waits for them."""

    def finish(
        state: Any, shards: PyTree, sums: Messages, saved: PyTree, nbytes: Any
    ) -> tuple[Any, Any]:
        del nbytes
        known_bytes = [
            min(plain_bytes(group.communicator, reduction, x.size, x.dtype), MOST)
            for reduction, x in zip(pieces.reductions, sums.arrays)
        ]
        return pieces.finish(
            state, shards, sums, saved, jnp.asarray(np.array(known_bytes, np.uint32))
        )

    return pieces._replace(finish=finish)
