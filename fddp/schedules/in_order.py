"""Runs one task after the other."""

from functools import partial
from time import perf_counter
from typing import Any

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.schedules.lists import in_one_piece
from fddp.schedules.pieces import MakeList, Pieces, Runner
from fddp.schedules.programs import MakePrograms, jitted, preparing
from fddp.schedules.send import Sent, bytes_of, remembered
from fddp.schedules.shown import wait_for
from fddp.schedules.tasks import BYTES, Communicate, Task
from fddp.schedules.timeline import Span, Timeline


def after(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs the baseline: traffic starts when the backward is done, one all-reduce at a time (paper, section 3.2.1).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    return in_order(group, partial(in_one_piece, group.placement, pieces), donate)


def in_order(group: Group, make: MakeList, donate: bool, programs: MakePrograms = jitted) -> Runner:
    """Launches each task of a list when the one before it is done.

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

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        values = now.listed.enter(state, pending, shards, rows)
        sends = list[Sent]()
        spans.clear()
        ran[:] = now.listed.tasks
        for task in now.listed.tasks:
            read = [values[name] for name in task.reads]
            if isinstance(task, Communicate):
                message, *asked = read
                sends.append(now.send(len(sends), memory, lambda asked=asked: asked[0], message))
                spans.append(sends[-1].span)
                values[task.writes[0]] = sends[-1].total
                if BYTES in task.writes:
                    values[BYTES] = bytes_of(group, sends)
            else:
                start = perf_counter()
                group.journal.say(task.name)
                made = wait_for(task.name, now.programs[task.name](*read))
                spans.append(Span(task.kind, task.name, start, perf_counter()))
                values.update(zip(task.writes, made))
            del read
            for name in now.last_reads[task.name]:
                del values[name]
        return *now.listed.leave(values), remembered(sends, memory)

    return Runner(run, None, lambda: Timeline(tuple(spans), tuple(ran)), make)
