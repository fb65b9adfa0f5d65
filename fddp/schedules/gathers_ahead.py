"""Gathers new parameters before the step that needs them is called, so that gathers run under its forward pass.

Between two calls the parameters rest in shards, and the shards are the whole truth. Gathers that are over or under way
belong to those very shards: a step that is given other shards gathers anew. So nothing that a user can hold is ever
stale, and an error between two steps loses nothing.

A list whose parameters rest in shards opens with all-gathers, which read shards alone. It ends with updates, which
write the new shards bucket by bucket. So a gather may leave as soon as its own bucket is updated, under the rest of the
backward pass and under the next forward pass. `turned` moves the opening behind the rest of the list, where it reads
the new shards instead of the old ones.

Source: DeAR (Zhang et al., ICDCS 2023), whose gathers wait for the last scatter; `overlap_param_gather` in Megatron-LM,
which trains on stale weights where its buckets are not in the order of first use (Megatron-LM#950); ByteScheduler (Peng
et al., SOSP 2019) and PACE (Bao et al., INFOCOM 2020) for the order.
"""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import partial
from itertools import takewhile
from operator import is_
from typing import Any, NamedTuple

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.hook_memory import remembered
from fddp.schedules.launcher import Launched, Launcher, own_lane
from fddp.schedules.lists import in_stages
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.planned_memory import Launch, of_tasks
from fddp.schedules.programs import Prepared, preparing
from fddp.schedules.queues import Arranged, QueueOf, by_kind, freed, heard, routed
from fddp.schedules.send import sending
from fddp.schedules.staged import refuse_without_jit
from fddp.schedules.tasks import NEW, SHARDS, Communicate, Compute, Task, TaskList, Value

# One of so many buckets is gathered as soon as it is updated, among the first two thirds: not beside the last scatters.
STRIDE = 2
AHEAD = "all-gather"  # the queue of gathers
NEXT = "next"  # the path of a value that a step makes for the next one


class Ahead(NamedTuple):
    """Gathers that a step has sent for the next one."""

    of: tuple[Any, ...]
    """The shards that are gathered."""
    launched: Launched
    """The gathered values, under the names by which the next step reads them."""


def gathers_ahead(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs stages beside scatters, and updates and gathers beside both, each as soon as it can.

    Gradients leave in one order on one thread. Gathers leave in another order, on a thread and a communicator of their
    own, and are still under way when a step returns. Where a process has several devices, or sums go over nodes first,
    there is no second communicator: gathers take turns with gradients, and nothing is under way between two steps.

    Args:
      group: the replicas.
      pieces: the step; it opens with gathers.
      donate: whether updates may reuse the state's memory.

    Returns:
      The runner.
    """
    make = partial(in_stages, group.placement, pieces, used=lambda k, count: k)
    lane, beside = own_lane(group)
    sends = {AHEAD: sending(lane, pieces.rounds[0].reductions)}
    queue_of = heard(group, queue_of_gathers if beside else by_kind)
    prepare = preparing(group, make, partial(_arranged, queue_of), compiled, donate)
    launcher = Launcher(group, lanes=(AHEAD,))
    left: Ahead | None = None

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        nonlocal left
        refuse_without_jit("eager")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        opening, crossing, ending = now.arranged.routes
        group.recovery.sends()  # the step uses up its gathers: a rank that fails from here on may not begin anew alone
        values = now.listed.enter(state, pending, shards, rows)
        of = tuple(values[name] for name in opening.given)
        ahead = left
        left = None
        launcher.log.begin()
        # A step that is given other shards leaves no gathers: nobody might use these either.
        leaves = ahead is None or all(map(is_, ahead.of, of))
        if ahead and leaves:
            here = ahead.launched
        else:
            wait(ahead.launched.jobs.values() if ahead else ())
            given = dict(zip(opening.given, of))
            late = _futures(opening.kept) if beside else {}
            here = launcher.launch(now, opening, given, sends=sends, late=late)
        values.update(here.results)
        here.results.clear()
        late = _futures(map(following, opening.kept)) if leaves and beside else {}
        way = crossing if leaves else ending
        done = launcher.launch(now, way, values, memory=memory, sends=sends, before=here, late=late)
        memory = remembered(done, memory)
        if leaves:
            brought = {value: done.results.pop(following(value)) for value in opening.kept}
            given = tuple(done.results[new(value)] for value in opening.given)
            left = Ahead(given, done._replace(results=brought, memory={}))
        launcher.log.end()
        return *now.listed.leave(done.results), memory

    def tasks(*arguments: Any) -> TaskList:
        listed = make(*arguments)
        return listed._replace(tasks=turned(listed).tasks)

    def launch(now: Prepared) -> Launch:
        return Launch(turned(now.listed).tasks, {following(value): value for value in now.arranged.routes[0].kept})

    return Runner(run, None, launcher.log.timeline, tasks, of_tasks(group, prepare, launch))


def queue_of_gathers(task: Task) -> str:
    """The queue of a task, where gathers have one of their own."""
    if isinstance(task, Communicate) and task.reduction.collective == "all_gather":
        return AHEAD
    return by_kind(task)


def _arranged(queue_of: QueueOf, listed: TaskList) -> Arranged:
    """Arranges a list: its opening, a step that sends the next one's gathers, and a step that sends none."""
    parts = turned(listed)
    brought = tuple(task.writes[0] for task in parts.opening if isinstance(task, Communicate))
    opening = routed(parts.opening, queue_of, brought)
    crossing = routed(parts.tasks, queue_of, (*listed.results, *map(following, brought)))
    ending = routed((*parts.body, *parts.updates), queue_of, listed.results)
    return Arranged((opening, crossing, ending), freed([listed.tasks], queue_of))


def _futures(values: Iterable[Value]) -> dict[Value, Future[Any]]:
    return {value: Future() for value in values}


class Turned(NamedTuple):
    """A list in parts, each in the order in which its tasks are launched."""

    opening: tuple[Task, ...]
    """Packing and gathers, which read shards alone."""
    body: tuple[Task, ...]
    """Computing and its messages, which wait for the gathers."""
    updates: tuple[Task, ...]
    """The tasks that make the result and the new shards."""
    closing: tuple[Task, ...]
    """The updates again, each followed by the packing that it makes possible; then the gathers of the next step."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of a step whose own gathers were sent by the step before it."""
        return *self.body, *self.closing


def turned(listed: TaskList) -> Turned:
    """Moves the gathers with which a list opens to its end, for the next step.

    They leave in the order of first use, with one exception: of the buckets that are updated first, every second one is
    gathered at once. Scatters leave gaps on the link during the backward pass, and these gathers fill them. With fewer
    of them the link idles. With more, or beside the last scatters, the first stages of the next step wait for buckets
    that only later stages use.

    Args:
      listed: opens with gathers of shards, in the order of first use, and ends with updates.

    Returns:
      Its parts.
    """
    opening = tuple(takewhile(lambda task: task.kind != "compute", listed.tasks))
    rest = listed.tasks[len(opening) :]
    body = tuple(task for task in rest if task.kind != "update")
    updates = rest[len(body) :]
    again = [_again(task) for task in opening]
    packs = [task for task in again if isinstance(task, Compute)]
    closing = list[Task]()
    missing = (_written(updates) | _written(packs)) - _written(body)
    for task in updates:
        closing.append(task)
        missing.difference_update(task.writes)
        for pack in [pack for pack in packs if missing.isdisjoint(pack.reads)]:
            packs.remove(pack)
            closing.append(pack)
            missing.difference_update(pack.writes)
    made = {name: at for at, task in enumerate(closing) for name in task.writes}
    gathers = [task for task in again if isinstance(task, Communicate)]
    early = sorted(gathers, key=lambda task: made[task.reads[0]])
    early = early[: 2 * len(early) // 3 : STRIDE]
    closing += [*early, *(task for task in gathers if task not in early)]
    return Turned(opening, body, updates, tuple(closing))


def new(value: Value) -> Value:
    """The value that a step leaves for the next one, which is given it as this one."""
    return Value(NEW, path=value.path) if value.kind == SHARDS else value


def following(value: Value) -> Value:
    """The same value of the next step."""
    return Value(value.kind, value.number, NEXT)


def _again(task: Task) -> Task:
    """A task of the opening, for the next step."""
    writes = tuple(map(following, task.writes)) if isinstance(task, Communicate) else task.writes
    return task._replace(reads=tuple(map(new, task.reads)), writes=writes)


def _written(tasks: Iterable[Task]) -> set[Value]:
    return {value for task in tasks for value in task.writes}
