"""Runs compute tasks on the main thread, and sends messages on others, each as soon as it is made."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import perf_counter
from typing import Any

import jax

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.jax_internals import with_configuration, without_jit
from fddp.schedules.lists import in_stages
from fddp.schedules.pieces import MakeList, Pieces, Runner
from fddp.schedules.programs import MakePrograms, Prepared, compiled, preparing
from fddp.schedules.send import Sent, bytes_of, remembered, side_by_side
from fddp.schedules.shown import wait_for
from fddp.schedules.tasks import BYTES, Communicate, Compute, Task
from fddp.schedules.timeline import Span, Timeline


def staged(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Cuts the backward pass where buckets become ready: the main thread runs stages, another one sends their messages.

    For hosts whose XLA overlaps nothing by itself (CPU).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether updates may reuse the state's memory.

    Returns:
      The runner; stages are cut and compiled once for each form of its arguments.
    """
    return on_threads(group, partial(in_stages, group.placement, pieces), donate)


def on_threads(group: Group, make: MakeList, donate: bool, programs: MakePrograms = compiled) -> Runner:
    """Launches compute tasks in order and sends each message as soon as it is made.

    Messages leave in the order of the list on every rank, one at a time on each of the clones of the transport.

    Args:
      group: the replicas.
      make: makes the list.
      donate: whether programs may reuse the state's memory.
      programs: makes programs of its tasks.

    Returns:
      The runner.
    """
    prepare = preparing(group, make, programs, donate)
    spans = list[Span]()
    ran = list[Task]()
    # Threads begin with the first messages and live on: of each thread that ends the C library keeps a little.
    threads = [ThreadPoolExecutor(1, f"fddp-all-reduce-{number}") for number in range(len(group.transport.clones) or 1)]

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        refuse_without_jit("staged")
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        values = now.listed.enter(state, pending, shards, rows)
        spans.clear()
        ran[:] = now.listed.tasks
        count = len(side_by_side(group, [task.reduction for task in now.listed.messages]))
        sends = list[Future[Sent]]()
        try:
            send = with_configuration(partial(now.send, memory=memory))
            _launch(group, now, values, send, threads[:count], sends, spans)
        finally:
            # No message is called off: even after an error each thread sends those that were made, the same on all
            # ranks.
            wait(sends)
        done = [one.result() for one in sends]
        spans.extend(one.span for one in done)
        return *now.listed.leave(values), remembered(done, memory)

    return Runner(run, None, lambda: Timeline(tuple(spans), tuple(ran)), make)


def refuse_without_jit(schedule: str) -> None:
    """Refuses to run a schedule of stages operation by operation."""
    if without_jit():
        raise ValueError(
            f"under jax.disable_jit() a loss runs operation by operation, and schedule={schedule!r} has cut it into "
            "compiled stages: make the step with schedule='after' to look inside."
        )


def _launch(
    group: Group,
    now: Prepared,
    values: dict[str, Any],
    send: Callable[..., Sent],
    threads: Sequence[ThreadPoolExecutor],
    sends: list[Future[Sent]],
    spans: list[Span],
) -> None:
    """Runs all tasks. Adds what they write to `values`, their messages to `sends`, and when they ran to `spans`."""
    clock = perf_counter()
    # Tasks that were launched and may not be done, with their results and start times; and the messages behind them.
    launched = deque[tuple[Compute, Sequence[jax.Array], float] | Communicate]()

    def wait_for_launched() -> None:
        nonlocal clock
        while launched:
            oldest = launched.popleft()
            if isinstance(oldest, Communicate):
                leave(oldest)
                continue
            task, made, since = oldest
            wait_for(task.name, made)
            spans.append(Span(task.kind, task.name, max(since, clock), clock := perf_counter()))

    def leave(task: Communicate) -> None:
        k = len(sends)
        thread = k % len(threads)
        before = sends[thread :: len(threads)][-1:]
        message, *asked = [values[name] for name in task.reads]
        sends.append(threads[thread].submit(_follow, before, send, k, said=_said(asked), message=message))
        values.update(dict.fromkeys(task.writes, sends[-1]))
        forget(task)

    def awaited(name: str) -> list[Future[Sent]]:
        """The messages that must be back before a value is there."""
        value = values.get(name)
        return sends if name == BYTES else [value] if isinstance(value, Future) else []

    def arrived(name: str) -> Any:
        back = [one.result() for one in awaited(name)]
        return bytes_of(group, back) if name == BYTES else back[0].total if back else values[name]

    def forget(task: Task) -> None:
        for name in now.last_reads[task.name]:
            values.pop(name, None)

    for task in now.listed.tasks:
        if isinstance(task, Communicate):
            launched.append(task)
            continue
        # All messages that were made leave before this thread waits for one.
        if not all(name in values and all(one.done() for one in awaited(name)) for name in task.reads):
            wait_for_launched()
        read = [arrived(name) for name in task.reads]
        since = perf_counter()
        group.journal.say(task.name)
        try:
            made = now.programs[task.name](*read)
        finally:
            # One task is queued behind the one that runs, so that the core never waits for Python. Messages that were
            # made leave even if the next task fails: an error may show here, or only when its message is waited for.
            wait_for_launched()
        launched.append((task, made, since))
        values.update(zip(task.writes, made))
        forget(task)
        del read, made
    wait_for_launched()


def _said(asked: Sequence[Future[Sent]]) -> Callable[[], jax.Array]:
    """Makes a function that waits for the sum that decides whether a message is needed, and returns it."""
    return lambda: asked[0].result().total


def _follow(before: Sequence[Future[Sent]], send: Callable[..., Sent], *args: Any, **kwargs: Any) -> Sent:
    """Sends behind the message before it on the same thread; after an error there nothing more, on all ranks alike."""
    for one in before:
        one.result()
    return send(*args, **kwargs)
