"""The launcher: it computes a list of tasks on the calling thread, and sends and updates on others.

A schedule passes in its differences: the queue of each task, the queues that may go on after the
step, and the results that may arrive late. Three things hold for every schedule:
- The messages of a queue leave in the order of the list, on all ranks, even after an error.
- An error is raised once no task runs any more. The caller may start a new step, and the messages
  of two steps would mix.
- Messages that are still under way when a step returns use the group's lane, which sends those of
  all steps in order.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.profiler import TraceAnnotation

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.jax_internals import (
    asked_for,
    awaited,
    given_away,
    with_configuration,
    with_parts_listed,
)
from fddp.schedules.programs import Prepared
from fddp.schedules.queues import HERE, Do, Queues, speaks
from fddp.schedules.send import Sent, bytes_of
from fddp.schedules.step_log import StepLog
from fddp.schedules.tasks import Communicate, Task
from fddp.schedules.timeline import Span
from fddp.schedules.values import BYTES, Value


class Launched(NamedTuple):
    """A list after its launch, and the parts of it that are still running."""

    results: dict[Value, Any]
    """The requested values; futures of those that arrive late."""
    jobs: Mapping[str, Future[None]]
    """The queues of the other threads, by name."""
    arrived: Mapping[Value, Sent]
    """The messages that have arrived, by their inputs' names, without sums and hook memory."""
    memory: Mapping[int | None, Any]
    """The hooks' memory after the messages that have arrived, by its index."""


class Launcher:
    """Launches lists of tasks one after the other; its threads live as long as the step."""

    def __init__(self, group: Group, lanes: Collection[str] = (), ahead: int = 1) -> None:
        """`lanes` names the queues that may send after the return of a step. `ahead` is the number
        of programs launched while one runs, so that the core never waits for Python."""
        self._group = group
        self._lanes = lanes
        self._ahead = ahead
        # The C library keeps some memory of each thread that ends, so these live on.
        self._threads = dict[str, ThreadPoolExecutor]()
        self._jobs: Mapping[str, Future[None]] = {}
        self.log = StepLog()

    def launch(
        self,
        prepared: Prepared,
        values: dict[Value, Any],
        *,
        memory: Memory = (),
        late: Mapping[Value, Future[Any]] = MappingProxyType({}),
    ) -> Launched:
        """Runs a list until its computation ends and all results but the late ones are ready.

        `values` holds the initial values or futures of them, and is emptied. `memory` is the hooks'
        memory; its arrays may be promises. `late` holds a future for each result that may arrive
        late; if it is empty, nothing goes on.
        """
        routes = prepared.routes
        queues = Queues(routes, values, late)
        values.clear()
        arrived = dict[Value, Sent]()
        current_memory = dict[int | None, Any](enumerate(memory))
        jobs = self._jobs = dict[str, Future[None]]()
        # When messages were ready, as observed by their own threads.
        ready_at = dict[Value, float]()

        def sending(queue: str) -> Do:
            other_queues = [q for q in routes.speaking if q not in {queue, *self._lanes}]
            other_jobs = lambda: [jobs[q] for q in other_queues]  # noqa: E731
            return self._sending(prepared, current_memory, arrived, other_jobs, ready_at)

        updating = self._updating(prepared)
        computing, idle = self._computing(prepared, ready_at)
        work = with_configuration(queues.work)
        try:
            for queue in routes.queues:
                if queue != HERE:
                    do = _by_kind(sending(queue), updating, self._exchanging(prepared))
                    jobs[queue] = self._start(work, queue, do)
            queues.work(HERE, _by_kind(sending(HERE), computing, computing), idle)
            results = {
                name: x if name in late else awaited(x) for name, x in queues.results().items()
            }
            for queue, job in jobs.items():
                if not (late and (queue in self._lanes or routes.makes(queue, late))):
                    job.result()
        except BaseException as error:
            for queue in routes.queues.keys() - jobs.keys():  # a thread may fail to start
                queues.fail(queue, error)
            wait(list(jobs.values()))
            raise
        return Launched(results, jobs, arrived, current_memory)

    def failed(self) -> bool:
        """True if a queue of the last launch has failed since; reports each failure once."""
        failed = any(job.done() and job.exception() for job in self._jobs.values())
        if failed:
            self._jobs = {}
        return failed

    def _start(self, work: Callable[[str, Do], None], queue: str, do: Do) -> Future[None]:
        """Starts a queue on its thread."""
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, f"fddp-{queue}")
        thread = self._threads[queue]
        if queue in self._lanes:
            return self._group.lane.add(thread, work, queue, do)
        return thread.submit(work, queue, do)

    def _computing(
        self, prepared: Prepared, ready_at: Mapping[Value, float]
    ) -> tuple[Do, Callable[[], None]]:
        """Makes two functions: to launch a program, and to wait for all launched programs."""
        launched = deque[tuple[Task, Sequence[Any], float]]()
        crossing = prepared.routes.crossing
        clock = perf_counter()

        def wait_until(at_most: int) -> None:
            nonlocal clock
            while len(launched) > at_most:
                task, outputs, since = launched.popleft()
                # A program's outputs are ready together. The next task may have overwritten some of
                # them; if it has overwritten all, it is waited for next.
                ready = (x for x in jax.tree.leaves(outputs) if not given_away(x))
                _wait_for(task.name, next(ready, ()))
                observed = [ready_at[value] for value in task.writes if value in ready_at]
                end = min([perf_counter(), *observed])
                begin = max(since, clock)
                clock = max(begin, end)
                self.log.add(Span(task.kind, task.name, begin, clock))

        def do(task: Task, inputs: Sequence[Any]) -> Sequence[Any]:
            since = perf_counter()
            self._group.journal.say(task.name)
            outputs = prepared.programs[task.name](*inputs)
            if not crossing.isdisjoint(task.writes):
                with_parts_listed(outputs)  # other threads read the parts, as this one does
            launched.append((task, outputs, since))
            wait_until(self._ahead)
            return outputs

        return do, lambda: wait_until(0)

    def _updating(self, prepared: Prepared) -> Do:
        """Makes a function that runs an update and waits for it."""

        def do(task: Task, inputs: Sequence[Any]) -> Sequence[Any]:
            # A collective of MPI takes a token, and each thread has its own.
            with self.log.under_way(task), asked_for():
                return _wait_for(task.name, prepared.programs[task.name](*inputs))

        return do

    def _exchanging(self, prepared: Prepared) -> Do:
        """Makes a function that runs a collective of the loss and waits for its result."""

        def do(task: Task, inputs: Sequence[Any]) -> Sequence[Any]:
            inputs = jax.block_until_ready(inputs)
            nbytes = sum(x.nbytes for x in inputs) // self._group.placement.replicas_in_array
            journal = self._group.journal.message(task.name, nbytes)
            with self.log.under_way(task), journal, asked_for():
                return _wait_for(task.name, prepared.programs[task.name](*inputs))

        return do

    def _sending(
        self,
        prepared: Prepared,
        memory: dict[int | None, Any],
        arrived: dict[Value, Sent],
        other_jobs: Callable[[], Sequence[Future[None]]],
        ready_at: dict[Value, float],
    ) -> Do:
        """Makes a function that sends a message and waits for its sum.

        The last message also reports the bytes of all, once the other queues of messages have
        ended.
        """

        def do(task: Task, inputs: Sequence[Any]) -> Sequence[Any]:
            message, *flags = jax.block_until_ready(inputs)
            number = prepared.numbers[task.reads[0]]
            index = prepared.listed.messages[number].reduction.memory
            ready_at[task.reads[0]] = perf_counter()
            with self.log.under_way(task) as note:
                result = prepared.send(number, memory.get(index, ()), lambda: flags[0], message)
                note(result.span)
            if index in memory:
                memory[index] = result.memory
            # Without the sum, which lives no longer than its last reader needs it.
            arrived[task.reads[0]] = result._replace(total=None, memory=None)
            if BYTES in task.writes:
                return result.total, all_bytes()
            return (result.total,)

        def all_bytes() -> Any:
            for job in other_jobs():
                job.result()
            return bytes_of(self._group, [arrived[name] for name in prepared.numbers])

        return do


def own_lane(group: Group) -> tuple[Group, bool]:
    """Gives the same replicas another communicator, for messages that leave between two steps.

    Returns the group, and True if its messages may travel while others do. They may not without a
    second communicator.
    """
    transports = group.lane.carriers(group.transport)
    return replace(group, transport=transports[-1]), len(transports) > 1


def _by_kind(sending: Do, computing: Do, exchanging: Do) -> Do:
    def do(task: Task, inputs: Sequence[Any]) -> Sequence[Any]:
        if isinstance(task, Communicate):
            return sending(task, inputs)
        if speaks(task):
            return exchanging(task, inputs)
        return computing(task, inputs)

    return do


def _wait_for(name: str, outputs: Any) -> Any:
    """Waits for the outputs of a task; a profiler shows the wait under the task's name."""
    with TraceAnnotation(name):
        return jax.block_until_ready(outputs)
