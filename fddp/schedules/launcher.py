"""The launcher: it runs any list of tasks, computes on the calling thread, and does all else beside that.

What differs between schedules is given to it: the queue of a task, the queues that may go on after the step, and the
results that may come late. Three things hold for all of them. The messages of a queue leave in the order of the list,
after an error too: those that were made, the same on all ranks. An error waits for all that is under way before it is
raised, for whoever catches it may begin anew, and messages of two steps would mix. And the messages that a step leaves
under way go in the group's lane, where those of several steps never meet.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax

from fddp.comm import Group, Recovery
from fddp.hooks import Memory
from fddp.jax_internals import asked_for, given_away, with_configuration, with_parts_listed
from fddp.schedules.programs import Prepared
from fddp.schedules.queues import HERE, Do, Queues, Routes, awaited, speaks
from fddp.schedules.send import Sent, bytes_of
from fddp.schedules.shown import wait_for
from fddp.schedules.step_log import StepLog
from fddp.schedules.tasks import BYTES, Communicate, Task, Value
from fddp.schedules.timeline import Span

Send: TypeAlias = Callable[..., Sent]


class Launched(NamedTuple):
    """A list after its launch, and what of it goes on."""

    results: dict[Value, Any]
    """The values that were wanted; futures of those that come late."""
    jobs: Mapping[str, Future[None]]
    """The queues beside the calling thread's, by name."""
    sent: Mapping[Value, Sent]
    """The messages that are over, by the names of what was sent, without their sums and memories."""
    memory: Mapping[int | None, Any]
    """The hooks' memory as the messages that are over have left it, by its places."""


NOTHING = Launched({}, {}, {}, {})


class Launcher:
    """Launches lists of tasks, one after the other; its threads live as long as the step."""

    def __init__(self, group: Group, lanes: Collection[str] = (), ahead: int = 1) -> None:
        """Args:
        group: the replicas.
        lanes: the queues whose messages may be under way when the step has returned.
        ahead: the number of programs that are launched while one runs, so that the core never waits for Python.
        """
        self._group = group
        self._lanes = lanes
        self._ahead = ahead
        # Of each thread that ends the C library keeps a little, so these live on.
        self._threads = dict[str, ThreadPoolExecutor]()
        self._jobs: Mapping[str, Future[None]] = {}
        self.log = StepLog()

    def launch(
        self,
        now: Prepared,
        routes: Routes,
        values: dict[Value, Any],
        *,
        memory: Memory = (),
        sends: Mapping[str, Send] = MappingProxyType({}),
        before: Launched = NOTHING,
        late: Mapping[Value, Future[Any]] = MappingProxyType({}),
    ) -> Launched:
        """Runs a list until its computing is over, and all results are there that may not come late.

        Args:
          now: its programs.
          routes: the tasks, those of the list or some of them.
          values: those that are there at first, or futures of them; they are taken over.
          memory: of the hooks; its arrays may be futures.
          sends: (queue) → what sends its messages; as the list was prepared for queues that are left out.
          before: what was launched for this very step before; its updates wait for that.
          late: futures of the results that may come late; without any nothing goes on.

        Returns:
          The results, and what goes on.
        """
        queues = Queues(routes, values, late)
        values.clear()
        sent = dict[Value, Sent]()
        remembered = dict[int | None, Any](enumerate(memory))
        jobs = self._jobs = dict[str, Future[None]]()
        made = dict[Value, float]()  # when messages were made, where their own threads have seen it first

        def sending(queue: str) -> Do:
            one = sends.get(queue, now.send)
            others = [other for other in routes.speaking if other not in {queue, *self._lanes}]
            return self._sending(now, one, remembered, sent, before, lambda: [jobs[other] for other in others], made)

        updating = self._updating(now, before)
        computing, idle = self._computing(now, made)
        work = with_configuration(queues.work)
        try:
            for queue in routes.queues:
                if queue != HERE:
                    jobs[queue] = self._start(work, queue, _by_kind(sending(queue), updating, self._speaking(now)))
            queues.work(HERE, _by_kind(sending(HERE), computing, computing), idle)
            results = {name: x if name in late else awaited(x) for name, x in queues.kept().items()}
            for queue, job in jobs.items():
                if not (late and (queue in self._lanes or routes.makes(queue, late))):
                    job.result()
        except BaseException:
            wait([*before.jobs.values(), *jobs.values()])
            raise
        return Launched(results, jobs, sent, remembered)

    def failed(self) -> bool:
        """Whether a queue of the last launch has failed meanwhile; that is told once."""
        failed = any(job.done() and job.exception() for job in self._jobs.values())
        self._jobs = {} if failed else self._jobs
        return failed

    def _start(self, work: Callable[[str, Do], None], queue: str, do: Do) -> Future[None]:
        """Starts a queue on its thread."""
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, f"fddp-{queue}")
        thread = self._threads[queue]
        return self._group.lane.add(thread, work, queue, do) if queue in self._lanes else thread.submit(work, queue, do)

    def _computing(self, now: Prepared, seen: Mapping[Value, float]) -> tuple[Do, Callable[[], None]]:
        """Makes a function that launches a program while others run, and one that waits for all that were launched."""
        launched = deque[tuple[Task, Sequence[Any], float]]()
        clock = perf_counter()

        def wait_until(most: int) -> None:
            nonlocal clock
            while len(launched) > most:
                task, made, since = launched.popleft()
                # What the next task has written over is not there any more; that task is waited for in turn.
                wait_for(task.name, [x for x in jax.tree.leaves(made) if not given_away(x)])
                end = min([perf_counter(), *(seen[value] for value in task.writes if value in seen)])
                begin = max(since, clock)
                clock = max(begin, end)
                self.log.add(Span(task.kind, task.name, begin, clock))

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            since = perf_counter()
            self._group.journal.say(task.name)
            made = with_parts_listed(now.programs[task.name](*read))  # other threads look at them, as this one does
            launched.append((task, made, since))
            wait_until(self._ahead)
            return made

        return do, lambda: wait_until(0)

    def _updating(self, now: Prepared, before: Launched) -> Do:
        """Makes a function that runs an update and waits for it."""

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            for job in before.jobs.values():  # they may still read the memory that the update writes to
                job.result()
            # A collective of MPI takes a token along, which is new in each thread.
            with self.log.under_way(task), asked_for():
                return wait_for(task.name, now.programs[task.name](*read))

        return do

    def _speaking(self, now: Prepared) -> Do:
        """Makes a function that carries out collectives of the loss, and waits for what comes back."""

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            read = jax.block_until_ready(read)
            self._group.recovery.sends()
            nbytes = sum(x.nbytes for x in read) // self._group.placement.replicas_in_array
            with self.log.under_way(task), self._group.journal.message(task.name, nbytes), asked_for():
                return wait_for(task.name, now.programs[task.name](*read))

        return do

    def _sending(
        self,
        now: Prepared,
        send: Send,
        memory: dict[int | None, Any],
        sent: dict[Value, Sent],
        before: Launched,
        others: Callable[[], Sequence[Future[None]]],
        made: dict[Value, float],
    ) -> Do:
        """Makes a function that sends a message and waits for it; the last one tells the bytes of all."""

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            message, *asked = jax.block_until_ready(read)
            number = now.numbers[task.reads[0]]
            place = now.listed.messages[number].reduction.memory
            mine = jax.tree.map(awaited, memory.get(place, ()))
            made[task.reads[0]] = perf_counter()
            with self.log.under_way(task) as note:
                one = send(number, mine, lambda: asked[0], message)
                note(one.span)
            if place in memory:
                memory[place] = one.memory
            # Without the sum, which is to live no longer than until its last reader has it.
            sent[task.reads[0]] = one._replace(total=None, memory=None)
            return one.total, *([told()] if BYTES in task.writes else [])

        def told() -> Any:
            for job in (*before.jobs.values(), *others()):
                job.result()
            return bytes_of(self._group, [sent.get(name) or before.sent[name] for name in now.numbers])

        return do


def own_lane(group: Group) -> tuple[Group, bool]:
    """The same replicas on another communicator, and whether its messages may be under way with others.

    It needs a second communicator, and no GPUs: each has one queue for what several threads launch, in any order. Its
    messages belong to no step that may be tried again.
    """
    own = group.lane.carriers(group.transport, group.clone)
    lane = replace(group, transport=own[-1], recovery=Recovery(lambda place, seconds: False))
    return lane, len(own) > 1 and group.backend != "nccl"


def _by_kind(sending: Do, computing: Do, speaking: Do) -> Do:
    def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
        own = speaking if speaks(task) else computing
        return (sending if isinstance(task, Communicate) else own)(task, read)

    return do
