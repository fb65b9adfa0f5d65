"""Returns from a step before its last sums are back: they come, and are used, under the next step's forward pass.

An array of the state that is still to come is a promise. Whoever reads it waits. A step that is given promises begins
at once, and each of its stages waits for what that stage reads. So nothing is ever stale, whatever becomes of the state
meanwhile.

Source: ByteScheduler (Peng et al., SOSP 2019), which crosses the border between steps in the same way.
"""

from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Messages
from fddp.comm import MOST, Group
from fddp.hooks import Memory, plain_bytes
from fddp.jaxpr import used_up
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.gathers_ahead import gathers_ahead
from fddp.schedules.hook_memory import promised_memory, remembered
from fddp.schedules.launcher import Launcher, own_lane
from fddp.schedules.lists import forms_of, in_stages
from fddp.schedules.message_order import Trial, orders
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.planned_memory import of_tasks
from fddp.schedules.programs import preparing
from fddp.schedules.queues import Arranged, Promise, by_kind, freed, heard, routed
from fddp.schedules.slice_by_slice import slice_by_slice
from fddp.schedules.staged import refuse_without_jit
from fddp.schedules.tasks import TaskList, Value

BEHIND = "communication"  # the queue of messages that come back behind a step


def eager(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Overlaps two steps: gathers lead the next step where parameters rest in shards; else sums trail this one.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether updates may reuse the state's memory.

    Returns:
      The runner.
    """
    computes = pieces.rounds[0].kind == "compute"  # else it packs shards, to gather them
    return (sums_behind if computes else gathers_ahead)(group, pieces, donate)


def sums_behind(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs stages beside all-reduces, and updates beside both; returns after the stages, and the rest follows.

    Messages and updates have a thread each. The messages of all steps leave on a communicator of their own, one after
    the other. Where a process has several devices, or sums go over nodes first, there is no such communicator, and
    nothing is under way between two steps. Where there are two orders of the messages, the first steps try both.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether updates may reuse the optimizer's state's memory.

    Returns:
      The runner; a result that replaces an array of the state may be a `Promise`.
    """
    lane, beside = own_lane(group)
    plain = _all_plain(pieces)
    # On a mesh a hook's sums use the communicator that hosts use between two steps.
    beside = beside and (not group.placement.on_mesh or not any(one.apply for one in pieces.reductions))
    whole = all(one.collective == "all_reduce" and one.asks is None for one in pieces.reductions)
    first_use = pieces.uses if whole and beside else {}
    pieces = _told_at_once(group, pieces) if plain else pieces
    make = partial(in_stages, group.placement, pieces, used=lambda k, count: k, late=slice_by_slice)
    queue_of = heard(group, by_kind)
    trial = Trial(group)
    launcher = Launcher(group, lanes=(BEHIND,))
    # The forms of what a step may promise, for each form of arguments, once one such step has waited for all.
    known = dict[int, dict[Value, jax.ShapeDtypeStruct]]()
    used = list[Any]()  # arrays that a step donates; it may not have come to that when the next step begins

    def arrange(listed: TaskList) -> Arranged:
        each = [one.tasks for one in orders(listed, first_use)]
        return Arranged(tuple(routed(tasks, queue_of, listed.results) for tasks in each), freed(each, queue_of))

    prepare = preparing(lane, make, arrange, compiled, donate)

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        refuse_without_jit("eager")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        values = now.listed.enter(state, pending, shards, rows)
        donated = set(map(id, used))
        if any(id(x) in donated for x in values.values()):
            raise used_up()
        if launcher.failed():  # after the last step had returned: not all ranks come here then
            group.recovery.fail()
        group.recovery.sends()  # a rank that fails from here on may not begin anew alone
        launcher.log.begin()
        routes = now.arranged.routes[trial.way(len(now.arranged.routes))]
        began = perf_counter()
        first = id(now) not in known
        carried = [name for name in routes.kept if name.replaces in values] if first and beside else []
        used[:] = [values[name] for name in now.arranged.gives]
        late = {name: Promise(form) for name, form in known.get(id(now), {}).items()}
        done = launcher.launch(now, routes, values, memory=memory, late=late)
        results = done.results
        job = done.jobs.get(BEHIND) if late and memory else None
        memory = promised_memory(done, job, memory) if job else remembered(done, memory)
        if first:
            known[id(now)] = forms_of({name: results[name] for name in carried})
        launcher.log.end()
        trial.took(perf_counter() - began)
        return *now.listed.leave(results), memory

    def tasks(*arguments: Any) -> TaskList:
        made = orders(make(*arguments), first_use)
        return made[min(trial.latest, len(made) - 1)]

    return Runner(run, None, launcher.log.timeline, tasks, of_tasks(group, prepare), promises=True)


def _all_plain(pieces: Pieces) -> bool:
    return not any(one.apply or one.asks or one.collective != "all_reduce" for one in pieces.reductions)


def _told_at_once(group: Group, pieces: Pieces) -> Pieces:
    """Tells the bytes of plain sums at once: they are known before the sums leave, and need not be waited for."""

    def finish(state: Any, shards: Any, came: Messages, kept: Any, nbytes: Any) -> tuple[Any, Any]:
        del nbytes
        sends = zip(pieces.reductions, came.arrays)
        told = [min(plain_bytes(group.communicator, one, x.size, x.dtype), MOST) for one, x in sends]
        return pieces.finish(state, shards, came, kept, jnp.asarray(np.array(told, np.uint32)))

    return pieces._replace(finish=finish)
