"""Returns from a step before its last sums are back: they come, and are used, under the next step's forward pass.

An array of the state that is still to come is a promise. Whoever reads it waits. A step that is given promises begins
at once, and each of its stages waits for what that stage reads. So nothing is ever stale, whatever becomes of the state
meanwhile.

Source: ByteScheduler (Peng et al., SOSP 2019), which crosses the border between steps in the same way.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Messages
from fddp.comm import MOST, Group, Placement
from fddp.hooks import Memory, plain_bytes
from fddp.jax_internals import with_configuration
from fddp.jaxpr import used_up
from fddp.schedules.ahead import RESULTS
from fddp.schedules.behind import come_late, orders, read_once
from fddp.schedules.compiling import Compiling
from fddp.schedules.doing import computing, own_lane, updating
from fddp.schedules.lists import forms_of, in_stages
from fddp.schedules.log import Log
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.programs import Prepared, Programs, compiled, preparing
from fddp.schedules.queues import Do, Promise, Queues
from fddp.schedules.send import Sent, bytes_of
from fddp.schedules.tasks import BYTES, Task, TaskList, first_word, replaces
from fddp.schedules.threads import refuse_without_jit
from fddp.schedules.trial import Trial


def trailing(group: Group, pieces: Pieces, donate: bool) -> Runner:
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
    beside = beside and (group.axis_name is None or not any(one.apply for one in pieces.reductions))
    steps = Steps(group, beside, pieces.uses if plain and beside else {}, donate)
    pieces = _told_at_once(group, pieces) if plain else pieces

    def make(*arguments: Any) -> TaskList:
        return in_stages(group.placement, pieces, *arguments, used=lambda k, count: k, late=come_late)

    def tasks(*arguments: Any) -> TaskList:
        return steps.ordered(make(*arguments))

    prepare = preparing(lane, make, _compiled, donate)

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        refuse_without_jit("eager")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        values = now.listed.enter(state, pending, shards, rows)
        steps.admit(values)
        group.recovery.sends()  # a rank that fails from here on may not begin anew alone
        return *now.listed.leave(steps.step(now, values)), memory

    return Runner(run, None, steps.log.timeline, tasks, promises=True)


class Parts(NamedTuple):
    """The tasks of a list, by their queues."""

    computes: list[Task]
    messages: tuple[Task, ...]
    updates: list[Task]


class Form(NamedTuple):
    """Facts that are found once for each form of arguments."""

    orders: tuple[Parts, ...]
    """The list, in each order of its messages that may be the fastest."""
    results: list[str]
    """Names of the values that a step returns."""
    gives: list[str]
    """Names of the state's arrays that a step donates; it may not have come to that when the next step begins."""


def _parts(listed: TaskList) -> Parts:
    computes = [task for task in listed.tasks if task.kind == "compute"]
    return Parts(computes, listed.messages, [task for task in listed.tasks if task.kind == "update"])


class Steps:
    """Runs overlapping steps, each of which begins while the last sums of the one before it come back."""

    def __init__(self, group: Group, beside: bool, first_use: Mapping[str, int], donate: bool) -> None:
        """Args:
        group: the replicas.
        beside: whether messages may be under way beside others.
        first_use: of the messages that may be put off, see `trailed`.
        donate: whether updates may reuse the state's memory.
        """
        self._group = group
        self._beside = beside
        self._first_use = first_use
        self._donate = donate
        self.log = Log()
        self._trial = Trial(group)
        # The forms of what a step may promise, for each form of arguments, once one such step has waited for all.
        self._late: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}
        self._forms = dict[int, Form]()
        # Threads for messages and updates live as long as the step: of each that ends the C library keeps a little.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fddp-queue")
        self._jobs = list[Future[None]]()
        self._used = list[Any]()

    def ordered(self, listed: TaskList) -> TaskList:
        """Puts a list's messages in the order of the last step's."""
        made = orders(listed, self._first_use)
        return made[min(self._trial.latest, len(made) - 1)]

    def admit(self, values: Mapping[str, Any]) -> None:
        """Refuses values that the step before rules out, and a step after a message that failed.

        Args:
          values: those that are there at first, or promises of them.

        Raises:
          ValueError: its updates write, or will, to the memory of one of them.
          RuntimeError: one of its messages failed after it had returned, and not all ranks come here after that.
        """
        if any(x is used for x in values.values() for used in self._used):
            raise used_up()
        if any(job.done() and job.exception() for job in self._jobs):
            self._jobs.clear()
            self._group.recovery.fail()

    def step(self, now: Prepared, values: dict[str, Any]) -> dict[str, Any]:
        """Runs a step until its stages are over and all results are there that it does not promise.

        Args:
          now: its programs.
          values: those that are there at first, or promises of them; they are taken over.

        Returns:
          Its result and the new shards, by name. The new state is made of promises, but for the first step of a form.
        """
        self.log.begin()
        late = self._late.get(id(now), {})
        form = self._form_of(now)
        parts = form.orders[self._trial.way(len(form.orders))]
        began = perf_counter()
        carried = [name for name in form.results if self._beside and replaces(name) in values]
        queues = Queues(
            now.listed.tasks,
            values,
            form.results,
            lambda name: Promise(late[name]) if name in late else Future(),
        )
        self._used = [values[name] for name in form.gives]
        values.clear()
        compute, idle = computing(now.programs, self._group.journal, self.log)
        jobs = self._jobs = self._start(now, parts, queues)
        try:
            queues.work(parts.computes, compute, idle)
            result: dict[str, Any] = {name: one if name in late else one.result() for name, one in queues.kept.items()}
            if not late:
                wait(jobs)
        except BaseException:
            # Whoever catches this may begin anew, and messages of two steps would mix.
            wait(jobs)
            raise
        if id(now) not in self._late:
            self._late[id(now)] = forms_of({name: result[name] for name in carried})
        self.log.end()
        self._trial.took(perf_counter() - began)
        return result

    def _form_of(self, now: Prepared) -> Form:
        if id(now) not in self._forms:
            made = tuple(map(_parts, orders(now.listed, self._first_use)))
            results = [name for task in now.listed.tasks for name in task.writes if first_word(name) in RESULTS]
            gives = {name for names in read_once(now.listed).values() for name in names if first_word(name) == "state"}
            self._forms[id(now)] = Form(made, results, sorted(gives) if self._donate else [])
        return self._forms[id(now)]

    def _start(self, now: Prepared, parts: Parts, queues: Queues) -> list[Future[None]]:
        work = with_configuration(queues.work)
        return [
            self._group.lane.add(self._threads, work, parts.messages, self._sending(now, parts)),
            self._threads.submit(work, parts.updates, updating(now.programs, self.log)),
        ]

    def _sending(self, now: Prepared, parts: Parts) -> Do:
        numbers = {task.name: number for number, task in enumerate(now.listed.messages)}
        sent = dict[str, Sent]()

        def do(task: Task, read: Sequence[Any]) -> Sequence[Any]:
            message, *asked = jax.block_until_ready(read)
            with self.log.under_way(task) as note:
                one = now.send(numbers[task.name], (), lambda: asked[0], message)
                note(one.span)
            sent[task.reads[0]] = one._replace(total=None)
            return one.total, *([told()] if BYTES in task.writes else [])

        def told() -> Any:
            return bytes_of(self._group, [sent[f"message {k}"] for k in range(len(numbers))])

        return do


def _compiled(
    placement: Placement, listed: TaskList, values: Mapping[str, Any], donate: bool, says: Compiling
) -> Programs:
    return compiled(placement, listed, values, donate, says, read_once(listed))


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
