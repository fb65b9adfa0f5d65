"""When a step computed and when it communicated: spans, what they say about overlap, and what others would take.

Source: the columns of Li et al. (VLDB 2020), Fig. 6, and of DDP's logging data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple


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
      >>> line = Timeline((Span("compute", "stage 0", 0, 2), Span("communication", "bucket 0", 1, 5)))
      >>> line.exposed, line.overlap_share
      (3, 0.25)
    """

    spans: tuple[Span, ...]

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
        """From the first start to the last end."""
        return max((s.end for s in self.spans), default=0) - min((s.start for s in self.spans), default=0)

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
        """Share of the communication that lies under computation, 0 to 1; 0 where nothing was sent."""
        total = self.communicating
        return 1 - self.exposed / total if total else 0.0

    def bound(self) -> float:
        """The earliest end, in seconds, that these stages and all-reduces allow.

        Each all-reduce starts when its stage is done and the link is free; each update when its all-reduce is done and
        all stages are. Computation beyond the stages of the buckets counts as an update. All-reduces that ran side by
        side (`fddp.round_robin`) are taken one after the other, each as long as it took beside the others.

        Returns:
          Seconds from the start of the first stage.
        """
        lengths, sends = [span.seconds for span in self.compute], [span.seconds for span in self.communication]
        updates = [sum(lengths[len(sends) :]), *(span.seconds for span in self.updates)]
        return simulate(lengths[: len(sends)], sends, updates).seconds

    def __str__(self) -> str:
        begin = min((span.start for span in self.spans), default=0)
        rows = [
            f"{span.kind:<13}  {span.name:<10}  {1e3 * (span.start - begin):8.2f} … {1e3 * (span.end - begin):8.2f} ms"
            for span in sorted(self.spans, key=lambda span: span.start)
        ]
        foot = (
            f"{1e3 * self.seconds:.2f} ms, {1e3 * self.exposed:.2f} ms of communication exposed, "
            f"{self.overlap_share:.0%} of all under computation; bound {1e3 * self.bound():.2f} ms"
        )
        return "\n".join([*rows, foot])


class Pace(NamedTuple):
    """How fast computation and communication go while both are under way, as shares of their speed alone.

    Traffic is no free companion: on CPU hosts it is added up and copied by cores that the backward pass needs.
    """

    compute: float = 1.0
    communication: float = 1.0


def simulate(
    stages: Sequence[float], sends: Sequence[float], updates: Sequence[float] = (), pace: Pace | None = None
) -> Timeline:
    """Runs a staged step on paper.

    Stages follow each other; all-reduce k starts when stage k (or the last one) is done and the link is free; updates
    follow the stages, each when its all-reduce is done.

    Args:
      stages: seconds of each stage alone.
      sends: seconds of each all-reduce alone.
      updates: seconds of each update; the last one follows the last all-reduce, the one before it the one before.
      pace: how both slow each other down; None: not at all, the bound of any schedule.

    Returns:
      The step's timeline, from 0.

    Example:
      >>> simulate([2.0, 1.0], [2.0, 1.0]).seconds
      5.0
      >>> simulate([2.0, 1.0], [2.0, 1.0], pace=Pace(compute=0.5, communication=1.0)).seconds
      5.0
      >>> simulate([2.0, 1.0], [2.0, 1.0], pace=Pace(compute=0.5, communication=0.5)).seconds
      6.0
    """
    pace, spans, clock = pace or Pace(), list[Span](), 0.0
    works, needs = ((*stages, *updates), tuple(sends)), len(stages) - 1
    done, since = [0, 0], [0.0, 0.0]
    left = [next(iter(work), 0.0) for work in works]

    def ready() -> tuple[bool, bool]:
        computed, sent = done
        # The all-reduce that the next update waits for.
        awaited = computed - len(works[0]) + len(sends)
        return (
            computed < len(stages) or (computed < len(works[0]) and sent > awaited),
            sent < len(sends) and computed > min(sent, needs),
        )

    while done[0] < len(works[0]) or done[1] < len(sends):
        busy = ready()
        speeds = pace if all(busy) else Pace()
        ends = [left[side] / speeds[side] if busy[side] else inf for side in (0, 1)]
        passed = min(ends)
        for side in (0, 1):
            if not busy[side]:
                since[side] = clock + passed
            elif ends[side] > passed:
                left[side] -= passed * speeds[side]
            else:
                spans.append(Span(*_named(side, done[side], len(stages)), since[side], clock + passed))
                done[side] += 1
                since[side] = clock + passed
                left[side] = next(iter(works[side][done[side] :]), 0.0)
        clock += passed
    return Timeline(tuple(spans))


def observed_pace(line: Timeline, stages: float, sends: float) -> Pace:
    """How computation and traffic slowed each other down in a run: work not done while both were busy.

    Args:
      line: the run.
      stages: seconds that its computation takes alone.
      sends: seconds that its all-reduces take alone.

    Returns:
      The pace; 1 where nothing overlapped or nothing was lost.

    Example:
      >>> stage, send = Span("compute", "stage", 0, 5), Span("communication", "bucket", 1, 5)
      >>> observed_pace(Timeline((stage, send)), 4.0, 4.0)
      Pace(compute=0.75, communication=1.0)
    """
    both = line.overlap

    def speed(took: float, alone: float) -> float:
        return min(1.0, max(SLOWEST, 1 - (took - alone) / both)) if both else 1.0

    return Pace(speed(line.computing, stages), speed(line.communicating, sends))


SLOWEST = 0.05  # a pace is a share of something: a run so noisy that it shows none still gets on


def _named(side: int, number: int, stages: int) -> tuple[str, str]:
    """Kind and name of what was computed (side 0) or sent."""
    if side:
        return "communication", f"bucket {number}"
    return ("compute", f"stage {number}") if number < stages else ("update", f"update {number - stages}")


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
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in _merged(a) for begin, stop in _merged(b))
