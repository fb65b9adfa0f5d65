"""Gathers new parameters before the step that needs them is called, so that gathers run under its forward pass.

Between two calls the parameters rest in shards, and the shards are the whole truth. Gathers that are over or under way
belong to those very shards: a step that is given other shards gathers anew. So nothing that a user can hold is ever
stale, and an error between two steps loses nothing.

Source: DeAR (Zhang et al., ICDCS 2023); `overlap_param_gather` in Megatron-LM, which trains on stale weights where its
buckets are not in the order of first use (Megatron-LM#950).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import jax

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.jax_internals import with_configuration
from fddp.schedules.ahead import AHEAD, NEXT, Turned, new, queue_of, turned
from fddp.schedules.doing import compiled_apart, computing, own_lane, updating
from fddp.schedules.lists import in_stages
from fddp.schedules.log import Log
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.programs import Prepared, preparing
from fddp.schedules.queues import Do, Queues
from fddp.schedules.send import Sent, bytes_of, sending
from fddp.schedules.tasks import BYTES, Task, TaskList
from fddp.schedules.threads import refuse_without_jit
from fddp.schedules.trailing import trailing


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
    return (trailing if computes else leading)(group, pieces, donate)


def leading(group: Group, pieces: Pieces, donate: bool) -> Runner:
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
    prepare = preparing(group, make, compiled_apart, donate)
    known = dict[int, Turned]()
    lane, beside = own_lane(group)
    crossing = Crossing(group, sending(lane, pieces.rounds[0].reductions), beside)

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        refuse_without_jit("eager")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        if id(now) not in known:
            known[id(now)] = turned(now.listed)
        group.recovery.sends()  # the step uses up its gathers: a rank that fails from here on may not begin anew alone
        values = crossing.step(now, known[id(now)], now.listed.enter(state, pending, shards, rows))
        return *now.listed.leave(values), memory

    def tasks(*arguments: Any) -> TaskList:
        listed = make(*arguments)
        return listed._replace(tasks=turned(listed).tasks)

    return Runner(run, None, crossing.log.timeline, tasks)


class Ahead(NamedTuple):
    """Gathers that are under way for the next step."""

    of: tuple[Any, ...]
    """The shards that are gathered."""
    brought: dict[str, Future[Any]]
    """The gathered values, under the names by which the next step reads them."""
    sent: dict[str, Sent]
    """The gathers that are over, by name, without the gathered values."""
    job: Future[None]
    """The job that sends them, on a thread of its own."""


class Crossing:
    """Runs overlapping steps, each of which sends the gathers of the next one."""

    def __init__(self, group: Group, gather: Callable[..., Sent], beside: bool) -> None:
        """Args:
        group: the replicas.
        gather: sends the k-th gather.
        beside: whether it may do so beside other messages. Several devices of a process, reached by two threads in
            different orders, would wait for each other, and on one communicator two messages would mix.
        """
        self._group = group
        self._gather = gather
        self._beside = beside
        self._ahead: Ahead | None = None
        self.log = Log()
        # The threads live as long as the step: of each thread that ends the C library keeps a little. The gathers that
        # a step leaves behind have one of them, and wait for none of the next step's jobs.
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="fddp-queue")

    def step(self, now: Prepared, parts: Turned, values: dict[str, Any]) -> dict[str, Any]:
        """Runs a step.

        Args:
          now: its programs.
          parts: its tasks.
          values: those that are there at first; they are taken over.

        Returns:
          Its result and the new shards, by name.
        """
        self.log.begin()
        of = tuple(values[name] for name in parts.given)
        here, crosses = self._left(of)
        here = here or self._open(now, parts, values, of)
        tasks = parts.tasks if crosses else (*parts.body, *parts.updates)
        brought = [name + NEXT for name in parts.brought] if crosses else []
        queues = Queues(tasks, values | here.brought, [*parts.results, *brought])
        leaves = dict[str, Sent]()
        values.clear()
        here.brought.clear()
        sends = self._sending(now, here, leaves)
        compute, idle = computing(now.programs, self._group.journal, self.log)
        # An update waits for the step's own gathers: they may still read the memory of the shards that it writes to.
        jobs = self._start(queues, tasks, sends, self._updating(now, after=here.job))
        try:
            queues.work([task for task in tasks if task.kind == "compute"], compute, idle)
            for name in ("update", "communication"):
                jobs[name].result()
        except BaseException:
            # Whoever catches this may begin anew, and two gathers at once would mix.
            wait([here.job, *jobs.values()])
            raise
        result = {name: queues.kept[name].result() for name in parts.results}
        if crosses:
            promised = {name: queues.kept[name + NEXT] for name in parts.brought}
            self._ahead = Ahead(tuple(result[new(name)] for name in parts.given), promised, leaves, jobs[AHEAD])
        self.log.end()
        return result

    def _left(self, of: Sequence[Any]) -> tuple[Ahead | None, bool]:
        """Takes the gathers that the step before left, if they are of these shards; also tells whether to leave some.

        A step that was given other shards leaves no gathers: nobody might use these either.
        """
        here = self._ahead
        self._ahead = None
        if here is None or all(map(is_, here.of, of)):
            return here, True
        wait([here.job])
        return None, False

    def _open(self, now: Prepared, parts: Turned, values: Mapping[str, Any], of: tuple[Any, ...]) -> Ahead:
        """Sends this step's own gathers, which no step before has sent."""
        queues = Queues(parts.opening, values, parts.brought)
        sent = dict[str, Sent]()
        jobs = self._start(queues, parts.opening, self._sending(now, None, sent), self._updating(now))
        if not self._beside:  # a gather that nothing reads could still be under way when the first gradients leave
            wait(jobs.values())
        return Ahead(of, queues.kept, sent, jobs[AHEAD if self._beside else "communication"])

    def _start(self, queues: Queues, tasks: Sequence[Task], send: Do, update: Do) -> dict[str, Future[None]]:
        """Starts all tasks but stages, each queue on a thread of its own."""
        work = with_configuration(queues.work)
        own: dict[str, list[Task]] = {"update": [], "communication": [], AHEAD: []}
        for task in tasks:
            if task.kind != "compute":
                own[queue_of(task) if self._beside else task.kind].append(task)
        return {
            "update": self._threads.submit(work, own["update"], update),
            "communication": self._threads.submit(work, own["communication"], send),
            AHEAD: self._group.lane.add(self._threads, work, own[AHEAD], send),
        }

    def _updating(self, now: Prepared, after: Future[None] | None = None) -> Do:
        return updating(now.programs, self.log, after)

    def _sending(self, now: Prepared, here: Ahead | None, leaves: dict[str, Sent]) -> Do:
        """Makes a function that sends messages; a step tells the bytes of the gathers that it used, not of the next."""
        numbers = {task.name: number for number, task in enumerate(now.listed.messages)}
        sent = dict[str, Sent]()

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            message, *asked = jax.block_until_ready(read)
            ahead = queue_of(task) == AHEAD
            send = self._gather if ahead else now.send
            with self.log.under_way(task) as note:
                one = send(numbers[task.name], (), lambda: asked[0], message)
                note(one.span)
            # Without its value, which is to live no longer than until its last reader has it.
            (leaves if ahead else sent)[task.name] = one._replace(total=None)
            return one.total, *([told()] if BYTES in task.writes else [])

        def told() -> Any:
            if here:
                here.job.result()
                sent.update(here.sent)
            return bytes_of(self._group, [sent[name] for name in numbers])

        return do
