"""Overlaps a step with the one before it: that one already sends the gathers with which this step opens.

A list whose parameters rest in shards opens with all-gathers, which read shards alone. It ends with updates, which
write the new shards bucket by bucket. So a gather may leave as soon as its own bucket is updated, under the rest of the
backward pass and under the next forward pass. `turned` moves the opening behind the rest of the list, where it reads
the new shards instead of the old ones.

Source: DeAR (Zhang et al., ICDCS 2023), whose gathers wait for the last scatter; ByteScheduler (Peng et al., SOSP 2019)
and PACE (Bao et al., INFOCOM 2020) for the order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from fddp.schedules.tasks import NEW, SHARDS, Communicate, Compute, Task, TaskList, first_word, replaces
from fddp.schedules.timeline import simulate

# One of so many buckets is gathered as soon as it is updated, among the first two thirds: not beside the last scatters.
STRIDE = 2
AHEAD = "ahead"  # the queue of gathers
NEXT = ", next"  # ends the names of the values that a step makes for the next one
RESULTS = (NEW, "result")
STEPS = 4  # that are simulated: the last one takes as long as all that would follow


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

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the shards that the opening reads."""
        return tuple(sorted({name for task in self.opening for name in task.reads} - _written(self.opening)))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the values that a step returns."""
        return tuple(name for name in _written(self.updates) if first_word(name) in RESULTS)

    @property
    def brought(self) -> tuple[str, ...]:
        """Names of the values that the gathers bring."""
        return tuple(task.writes[0] for task in self.opening if isinstance(task, Communicate))


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


def steady_seconds(
    tasks: Sequence[Task], seconds: Mapping[str, float], late: Callable[[str], Any] = lambda name: False
) -> float:
    """Simulates several steps in a row, and returns how long one takes after many like it: see `simulate`.

    Args:
      tasks: of a step that overlaps the next one.
      seconds: of each task, by its name.
      late: (name of a result) → whether the step returns before it is there.

    Returns:
      Seconds between the ends of the updates of two steps.
    """
    written = [name for task in tasks for name in task.writes]
    results = [name for name in written if first_word(name) in RESULTS]
    # The name by which a step reads a value → the name by which the step before it has written that value.
    before = {replaces(name): name for name in results if late(name)}
    before |= {name.removesuffix(NEXT): name for name in written if name.endswith(NEXT)}
    several = list[Task]()
    took = dict[str, float]()
    ends = list[str]()
    for step in range(STEPS):
        for place, task in enumerate(tasks):
            reads = [_at(step - 1, before[name]) if name in before else _at(step, name) for name in task.reads]
            # A step begins when the one before it has returned, with all results that are not late.
            reads += [_at(step - 1, name) for name in results if not late(name)] if place == 0 and step else []
            writes = tuple(_at(step, name) for name in task.writes)
            several.append(task._replace(name=_at(step, task.name), reads=tuple(reads), writes=writes))
            took[several[-1].name] = seconds.get(task.name, 0.0)
        ends.append(_at(step, [task.name for task in tasks if not set(results).isdisjoint(task.writes)][-1]))
    ended = {span.name: span.end for span in simulate(several, took, queue=queue_of).spans}
    return ended[ends[-1]] - ended[ends[-2]]


def queue_of(task: Task) -> str:
    """The queue of a task: tasks of one queue are done one after the other, different queues side by side."""
    return AHEAD if isinstance(task, Communicate) and task.reduction.collective == "all_gather" else task.kind


def kept_last(listed: TaskList) -> dict[str, tuple[str, ...]]:
    """Values that each task is the last to read, by its name; without those that another queue reads, which may lag."""
    queues: dict[str, set[str]] = {}
    for task in listed.tasks:
        for name in task.reads:
            queues.setdefault(name, set()).add(queue_of(task))
    last = listed.last_reads.items()
    return {task: tuple(name for name in names if len(queues[name]) == 1) for task, names in last}


def new(name: str) -> str:
    """The name under which a step leaves a value that the next one is given."""
    return NEW + name.removeprefix(SHARDS) if first_word(name) == SHARDS else name


def _again(task: Task) -> Task:
    """A task of the opening, for the next step."""
    writes = tuple(name + NEXT for name in task.writes) if isinstance(task, Communicate) else task.writes
    return task._replace(reads=tuple(map(new, task.reads)), writes=writes)


def _written(tasks: Iterable[Task]) -> set[str]:
    return {name for task in tasks for name in task.writes}


def _at(step: int, name: str) -> str:
    return f"{name} @{step}"
