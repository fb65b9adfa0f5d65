"""A step that begins while the one before it ends: the gathers that it opens with, turned over to that one's end.

A list whose parameters rest in shards opens with gathers, which need nothing but shards, and ends with new shards, a
bucket of them at a time. So a gather may leave as soon as its own bucket is updated, under what is left of the backward
pass and under the next forward pass. That is the same list, turned: what it opened with stands behind the rest, and
reads the new shards instead of the old ones.

Source: DeAR (Zhang et al., ICDCS 2023), whose gathers wait for the last scatter; ByteScheduler (Peng et al., SOSP 2019)
and PACE (Bao et al., INFOCOM 2020) for the order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from fddp.schedules.tasks import NEW, SHARDS, Communicate, Compute, Task, TaskList, first_word, replaces
from fddp.schedules.timeline import simulate

# Of so many buckets one is gathered as soon as it is updated, among the first two thirds: not beside the last scatters.
STRIDE = 2
AHEAD = "ahead"  # the queue of gathers
NEXT = ", next"  # how a step calls what the next one is given
RESULTS = (NEW, "result")
STEPS = 4  # on paper: the last of them is as all that follow


class Turned(NamedTuple):
    """A list in parts, each in the order in which its tasks are launched."""

    opening: tuple[Task, ...]
    """What needs nothing but shards: packing and gathers."""
    body: tuple[Task, ...]
    """What waits for what they bring: computing and its messages."""
    updates: tuple[Task, ...]
    """What makes the result and the new shards."""
    closing: tuple[Task, ...]
    """The updates again, each with the packing that it allows behind it, and the gathers of the next step."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """A step that is given what the gathers before it brought."""
        return *self.body, *self.closing

    @property
    def given(self) -> tuple[str, ...]:
        """The shards that the opening reads."""
        return tuple(sorted({name for task in self.opening for name in task.reads} - _written(self.opening)))

    @property
    def results(self) -> tuple[str, ...]:
        """What a step returns."""
        return tuple(name for name in _written(self.updates) if first_word(name) in RESULTS)

    @property
    def brought(self) -> tuple[str, ...]:
        """What gathers bring."""
        return tuple(task.writes[0] for task in self.opening if isinstance(task, Communicate))


def turned(listed: TaskList) -> Turned:
    """Turns a list.

    The gathers of the next step leave in the order of first use, but for every second one of the buckets that are
    updated first: it is gathered at once. Scatters leave holes on the link while the backward pass goes on, and these
    gathers fill them. With fewer the link idles; with more, and beside the last scatters, the first stages of the next
    step wait for what only later ones use.

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
    packs, closing = [task for task in again if isinstance(task, Compute)], list[Task]()
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


def steady_seconds(
    tasks: Sequence[Task], seconds: Mapping[str, float], late: Callable[[str], Any] = lambda name: False
) -> float:
    """How long a step takes after many like it, on paper: see `simulate`.

    Args:
      tasks: of a step that crosses the border to the next one.
      seconds: what each takes, by its name.
      late: which of its results the step does not wait for when it returns.

    Returns:
      Seconds between the ends of the updates of two steps.
    """
    written = [name for task in tasks for name in task.writes]
    results = [name for name in written if first_word(name) in RESULTS]
    # What a step reads, and as what the one before it has written it.
    before = {replaces(name): name for name in results if late(name)}
    before |= {name.removesuffix(NEXT): name for name in written if name.endswith(NEXT)}
    several, took, ends = list[Task](), dict[str, float](), list[str]()
    for step in range(STEPS):
        for place, task in enumerate(tasks):
            reads = [_at(step - 1, before[name]) if name in before else _at(step, name) for name in task.reads]
            # Python returns when all else is there.
            reads += [_at(step - 1, name) for name in results if not late(name)] if place == 0 and step else []
            writes = tuple(_at(step, name) for name in task.writes)
            several.append(task._replace(name=_at(step, task.name), reads=tuple(reads), writes=writes))
            took[several[-1].name] = seconds.get(task.name, 0.0)
        ends.append(_at(step, [task.name for task in tasks if not set(results).isdisjoint(task.writes)][-1]))
    ended = {span.name: span.end for span in simulate(several, took, queue=queue_of).spans}
    return ended[ends[-1]] - ended[ends[-2]]


def queue_of(task: Task) -> str:
    """Tasks of one queue are done one after the other, those of different ones beside each other."""
    return AHEAD if isinstance(task, Communicate) and task.reduction.collective == "all_gather" else task.kind


def kept_last(listed: TaskList) -> dict[str, tuple[str, ...]]:
    """What no later task reads, where tasks of another queue do not read it either: those may come later in time."""
    queues: dict[str, set[str]] = {}
    for task in listed.tasks:
        for name in task.reads:
            queues.setdefault(name, set()).add(queue_of(task))
    last = listed.last_reads.items()
    return {task: tuple(name for name in names if len(queues[name]) == 1) for task, names in last}


def new(name: str) -> str:
    """Under which name a step leaves what the next one is given."""
    return NEW + name.removeprefix(SHARDS) if first_word(name) == SHARDS else name


def _again(task: Task) -> Task:
    """A task of the opening, for the next step."""
    writes = tuple(name + NEXT for name in task.writes) if isinstance(task, Communicate) else task.writes
    return task._replace(reads=tuple(map(new, task.reads)), writes=writes)


def _written(tasks: Iterable[Task]) -> set[str]:
    return {name for task in tasks for name in task.writes}


def _at(step: int, name: str) -> str:
    return f"{name} @{step}"
