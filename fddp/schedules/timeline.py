"""The spans of a step and their overlap, measured or simulated.

Source: the columns of Li et al. (VLDB 2020), Fig. 6, and of DDP's logging data.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fddp.schedules.tasks import Communicate, Compute, Task
from fddp.schedules.values import MESSAGE, Value
from fddp.wording import preformatted


@dataclass(frozen=True)
class Span:
    """One stretch of work; times in seconds of a common clock."""

    kind: str
    """"compute" (forward and backward), "communication" or "update"."""
    name: str
    start: float
    end: float
    nbytes: int = 0
    """Bytes of the bucket, for communication."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step.

    Example:
      >>> line = Timeline((Span("compute", "stage", 0, 2), Span("communication", "bucket", 1, 5)))
      >>> line.exposed, line.overlap_share
      (3, 0.25)
    """

    spans: tuple[Span, ...]
    tasks: tuple[Task, ...] = ()
    """The tasks that were launched, with a span each; none where only the spans are known."""

    @property
    def compute(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.kind == "compute")

    @property
    def communication(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.kind == "communication")

    @property
    def updates(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.kind == "update")

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0) - self._begin

    @property
    def _begin(self) -> float:
        return min((span.start for span in self.spans), default=0)

    @property
    def computing(self) -> float:
        """Seconds during which something was computed."""
        return _covered(self.compute + self.updates)

    @property
    def communicating(self) -> float:
        """Seconds during which something was sent."""
        return _covered(self.communication)

    @property
    def overlap(self) -> float:
        """Seconds during which something was computed and something sent."""
        return _common(self.communication, self.compute + self.updates)

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing was computed."""
        return self.communicating - self.overlap

    @property
    def overlap_share(self) -> float:
        """Share of the communication that lies under computation, 0 to 1; 0 without messages."""
        total = self.communicating
        if not total:
            return 0.0
        return 1 - self.exposed / total

    def bound(self) -> float:
        """The earliest end that these tasks allow if each takes as long as it took: see `simulate`.

        In seconds from the start of the first task. Concurrent all-reduces (`fddp.round_robin`) are
        simulated one after the other, each as long as it took next to the others.
        """
        return simulate(self.tasks, {span.name: span.seconds for span in self.spans}).seconds

    def __str__(self) -> str:
        rows = list[str]()
        for span in sorted(self.spans, key=lambda span: span.start):
            start = 1e3 * (span.start - self._begin)
            end = 1e3 * (span.end - self._begin)
            rows.append(f"{span.kind:<13}  {span.name:<10}  {start:8.2f} … {end:8.2f} ms")
        foot = (
            f"{1e3 * self.seconds:.2f} ms, {1e3 * self.exposed:.2f} ms of communication exposed, "
            f"{self.overlap_share:.0%} of all under computation"
        )
        if self.tasks:
            foot += f"; bound {1e3 * self.bound():.2f} ms"
        return "\n".join([*rows, foot])

    _repr_html_ = preformatted


class Pace(NamedTuple):
    """The speeds of computation and communication while both run, as shares of their speeds alone.

    On CPU hosts traffic slows computation down: the same cores add and copy messages.
    """

    compute: float = 1.0
    communication: float = 1.0


def simulate(
    tasks: Sequence[Task],
    seconds: Mapping[str, float],
    pace: Pace | None = None,
    queue: Callable[[Task], Hashable] = lambda task: task.kind == "communication",
) -> Timeline:
    """Simulates a list of tasks.

    The tasks of one queue run in order, each as soon as its inputs are written. Computations run on
    the replica, messages on the link. Several queues of computations share the replica equally;
    several queues of messages share the link. `seconds` maps a task's name to its duration alone, 0
    if omitted. Without a pace, computation and traffic do not slow each other down: the bound of
    any launcher.

    Example:
      >>> tasks, seconds = outline([2.0, 1.0], [2.0, 1.0])
      >>> simulate(tasks, seconds).seconds
      5.0
      >>> simulate(tasks, seconds, Pace(compute=0.5, communication=1.0)).seconds
      5.0
      >>> simulate(tasks, seconds, Pace(compute=0.5, communication=0.5)).seconds
      6.0
    """
    pace = pace or Pace()
    spans = list[Span]()
    clock = 0.0
    queues: dict[Hashable, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(queue(task), deque()).append(task)
    missing = {name for task in tasks for name in task.writes}
    since = dict.fromkeys(queues, 0.0)
    remaining = {key: seconds.get(waiting[0].name, 0.0) for key, waiting in queues.items()}
    while queues:
        on_link = {
            key: queues[key][0].kind == "communication"
            for key in queues
            if missing.isdisjoint(queues[key][0].reads)
        }
        if not on_link:
            blocked = " and ".join(waiting[0].name for waiting in queues.values())
            raise ValueError(f"{blocked} would wait forever.")
        running = Counter(on_link.values())
        speeds = {
            key: (pace[side] if len(running) > 1 else 1.0) / running[side]
            for key, side in on_link.items()
        }
        passed = min(remaining[key] / speed for key, speed in speeds.items())
        clock += passed
        for key in list(queues):
            if key not in speeds:
                since[key] = clock
            elif remaining[key] / speeds[key] > passed:
                remaining[key] -= passed * speeds[key]
            else:
                task = queues[key].popleft()
                missing.difference_update(task.writes)
                spans.append(Span(task.kind, task.name, since[key], clock))
                since[key] = clock
                if queues[key]:
                    remaining[key] = seconds.get(queues[key][0].name, 0.0)
                else:
                    del queues[key]
    return Timeline(tuple(spans), tuple(tasks))


def outline(
    stages: Sequence[float], sends: Sequence[float], updates: Sequence[float] = ()
) -> tuple[tuple[Task, ...], dict[str, float]]:
    """A staged step without its programs, and the seconds of its tasks, for `simulate`.

    Stage k makes message k, and the last stage makes all remaining ones. The last update needs the
    last sum, and the update before it the sum before that. The arguments are the seconds of each
    stage, all-reduce and update alone; the tasks are named as those of the staged schedule.

    Example:
      >>> tasks, seconds = outline([2.0, 1.0], [2.0, 1.0], [0.5])
      >>> [task.name for task in tasks]
      ['stage 0', 'bucket 0', 'stage 1', 'bucket 1', 'update 0']
    """
    tasks = list[Task]()
    messages = [Value(MESSAGE, k) for k in range(len(sends))]
    sums = [Value("sum", k) for k in range(len(sends))]
    for k in range(max(len(stages), len(sends))):
        if k < len(stages) - 1:
            tasks.append(Compute(f"stage {k}", (), tuple(messages[k : k + 1])))
        elif k == len(stages) - 1:
            tasks.append(Compute(f"stage {k}", (), tuple(messages[k:])))
        if k < len(sends):
            tasks.append(Communicate(f"bucket {k}", (messages[k],), (sums[k],)))
    for k in range(len(updates)):
        message = len(sends) - len(updates) + k
        reads: tuple[Value, ...] = ()
        if message >= 0:
            reads = (sums[message],)
        tasks.append(Compute(f"update {k}", reads, (), kind="update"))
    seconds = dict[str, float]()
    for title, durations in (("stage", stages), ("bucket", sends), ("update", updates)):
        seconds |= {f"{title} {k}": x for k, x in enumerate(durations)}
    return tuple(tasks), seconds


# No pace is lower, so that a simulation ends even if a noisy run shows no speed at all.
SLOWEST = 0.05


def observed_pace(line: Timeline, stages: float, sends: float) -> Pace:
    """Estimates the pace of a run from the work that was missed while both sides were busy.

    `stages` and `sends` are the seconds that its computation and its all-reduces take alone. The
    pace is 1 where nothing overlapped or nothing was lost.

    Example:
      >>> stage, send = Span("compute", "stage", 0, 5), Span("communication", "bucket", 1, 5)
      >>> observed_pace(Timeline((stage, send)), 4.0, 4.0)
      Pace(compute=0.75, communication=1.0)
    """
    both = line.overlap

    def speed(took: float, alone: float) -> float:
        if not both:
            return 1.0
        return min(1.0, max(SLOWEST, 1 - (took - alone) / both))

    return Pace(speed(line.computing, stages), speed(line.communicating, sends))


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The stretches of time that spans cover, without overlaps."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


def _covered(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in _merged(spans))


def _common(a: Sequence[Span], b: Sequence[Span]) -> float:
    return sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in _merged(a)
        for begin, stop in _merged(b)
    )
