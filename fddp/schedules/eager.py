"""Gathers under the next forward pass: what a step will need of the new parameters leaves before the step is called.

Between two calls the parameters rest in shards, which are all of the truth: what gathers have brought, or are still
bringing, belongs to those very shards, and a step that is given others gathers anew. So nothing that a user can hold is
ever stale, and an error between two steps loses nothing.

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
    """Crosses the border between two steps: with gathers that lead where parameters rest in shards, else with sums that
    trail.

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
    """Stages beside scatters, and updates and gathers beside both, each as soon as it can be.

    Gradients leave in one order on one thread; gathers in another order on a thread and a communicator of their own,
    which a step leaves behind. Where there is no second communicator, for a process has several devices or sums go over
    nodes first, gathers take turns with gradients, and nothing is under way between two steps.

    Args:
      group: the replicas.
      pieces: the step; it opens with gathers.
      donate: whether updates may reuse the state's memory.

    Returns:
      The runner.
    """
    make = partial(in_stages, group.placement, pieces, used=lambda k, count: k)
    prepare, known = preparing(group, make, compiled_apart, donate), dict[int, Turned]()
    lane, beside = own_lane(group)
    crossing = Crossing(group, sending(lane, pieces.rounds[0].reductions), beside)

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        refuse_without_jit("eager")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        if id(now) not in known:
            known[id(now)] = turned(now.listed)
        group.recovery.sends()  # what was gathered is used up: who fails from here on may not begin anew alone
        values = crossing.step(now, known[id(now)], now.listed.enter(state, pending, shards, rows))
        return *now.listed.leave(values), memory

    def tasks(*arguments: Any) -> TaskList:
        listed = make(*arguments)
        return listed._replace(tasks=turned(listed).tasks)

    return Runner(run, None, crossing.log.timeline, tasks)


class Ahead(NamedTuple):
    """What is under way for the next step."""

    of: tuple[Any, ...]
    """The shards that it is made of."""
    brought: dict[str, Future[Any]]
    """What the gathers bring, under the names that the next step knows."""
    sent: dict[str, Sent]
    """The gathers that are over, by name, without what they brought."""
    job: Future[None]
    """The thread that sends them."""


class Crossing:
    """Steps of which one begins while the one before it ends."""

    def __init__(self, group: Group, gather: Callable[..., Sent], beside: bool) -> None:
        """Args:
        group: the replicas.
        gather: sends the k-th gather.
        beside: whether it may do so beside other messages. Several devices of a process, reached by two threads in
            different orders, would wait for each other, and on one communicator two messages would mix.
        """
        self._group, self._gather, self._beside = group, gather, beside
        self._ahead: Ahead | None = None
        self.log = Log()
        # As long as the step lives: of each thread that ends the C library keeps a little. What a step leaves behind
        # has one of them, and waits for none of the next step's jobs.
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
        queues, leaves = Queues(tasks, values | here.brought, [*parts.results, *brought]), dict[str, Sent]()
        values.clear()
        here.brought.clear()
        sends = self._sending(now, here, leaves)
        compute, idle = computing(now.programs, self._group.journal, self.log)
        # What is on its way may lie in the memory of the shards that an update writes to.
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
        """What the step before left for these very shards; and whether this one is to leave something.

        After a state that was not its own a step leaves nothing: it might again be for nobody.
        """
        here, self._ahead = self._ahead, None
        if here is None or all(map(is_, here.of, of)):
            return here, True
        wait([here.job])
        return None, False

    def _open(self, now: Prepared, parts: Turned, values: Mapping[str, Any], of: tuple[Any, ...]) -> Ahead:
        """Gathers what no step before did."""
        queues, sent = Queues(parts.opening, values, parts.brought), dict[str, Sent]()
        jobs = self._start(queues, parts.opening, self._sending(now, None, sent), self._updating(now))
        if not self._beside:  # what nothing reads could still be under way when the first gradients leave
            wait(jobs.values())
        return Ahead(of, queues.kept, sent, jobs[AHEAD if self._beside else "communication"])

    def _start(self, queues: Queues, tasks: Sequence[Task], send: Do, update: Do) -> dict[str, Future[None]]:
        """Does all tasks but stages, each queue on a thread of its own."""
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
        """Sends messages; the bytes that a step tells are those of the gathers that came, not of those that leave."""
        numbers, sent = {task.name: number for number, task in enumerate(now.listed.messages)}, dict[str, Sent]()

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            message, *asked = jax.block_until_ready(read)
            ahead = queue_of(task) == AHEAD
            send = self._gather if ahead else now.send
            with self.log.under_way(task) as note:
                one = send(numbers[task.name], (), lambda: asked[0], message)
                note(one.span)
            # What it brought lives until its last reader has it, and no longer.
            (leaves if ahead else sent)[task.name] = one._replace(total=None)
            return one.total, *([told()] if BYTES in task.writes else [])

        def told() -> Any:
            if here:
                here.job.result()
                sent.update(here.sent)
            return bytes_of(self._group, [sent[name] for name in numbers])

        return do
