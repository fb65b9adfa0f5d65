"""When a step computed, and when its messages travelled.

Source: the columns of Li et al. (VLDB 2020), Fig. 6, and of DDP's logging data.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from fddp.comm import Stamps
from fddp.wording import preformatted, table

WIDTH = 32  # characters of a message's line


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
class MessageTimes:
    """A message of a program; times in seconds of `time.monotonic`."""

    name: str
    """Its name in the plan, such as "bucket 0"."""
    nbytes: int
    """Bytes of its result."""
    started: float
    """The program hands it over."""
    sent: float
    """It begins to travel."""
    received: float
    """It has arrived."""
    awaited: float
    """The program begins to wait for it."""
    resumed: float
    """The program has waited for it."""
    done: float
    """Its results are copied."""


@dataclass(frozen=True)
class Timeline:
    """The spans of one step.

    Example:
      >>> line = Timeline((Span("compute", "stage", 0, 2), Span("communication", "bucket", 1, 5)))
      >>> line.exposed, line.overlap_share
      (3, 0.25)
    """

    spans: tuple[Span, ...]
    messages: tuple[MessageTimes, ...] = ()
    """The messages of one program between CPU processes, in the order in which it awaits them."""

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
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0)

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self._begin

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
        return self.communicating - self.exposed

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing was computed."""
        exposed = _covered(self.spans) - self.computing
        return min(max(0, exposed), self.communicating)  # but for rounding

    @property
    def overlap_share(self) -> float:
        """Share of the communication that lies under computation, 0 to 1; 0 without messages."""
        return 1 - self.exposed / self.communicating if self.communicating else 0.0

    def __str__(self) -> str:
        begin = self._begin
        ms = lambda *times: [f"{1e3 * (time - begin):.2f}" for time in times]  # noqa: E731
        rows = [
            [x.name, *ms(x.started, x.sent, x.received, x.awaited, x.done), self._drawn(x)]
            for x in self.messages
        ]
        times = ("started", "sent", "received", "awaited", "done")
        lines = table([["message", *times, "- queued, = travels, ! awaited"], *rows])
        if not rows:
            spans = sorted(self.spans, key=lambda span: span.start)
            lines = table([(x.kind, x.name, " … ".join(ms(x.start, x.end))) for x in spans])
        foot = (
            f"{1e3 * self.seconds:.2f} ms, {1e3 * self.exposed:.2f} ms of communication exposed, "
            f"{self.overlap_share:.0%} of all under computation"
        )
        return "\n".join([*lines, foot])

    _repr_html_ = preformatted

    def _drawn(self, message: MessageTimes) -> str:
        """A message as a line of characters, as long as the step."""

        def at(time: float) -> int:
            return round(WIDTH * (time - self._begin) / (self.seconds or 1))

        line = "." * WIDTH
        for sign, start, end in (
            ("-", message.started, message.sent),
            ("=", message.sent, message.received),
            ("!", message.awaited, message.resumed),
        ):
            first, last = max(0, at(start)), at(end)
            line = line[:first] + sign * (last - first) + line[max(first, last) :]
        return line


def timeline_of(stamps: Sequence[Stamps], begin: float) -> Timeline:
    """Makes the timeline of a program that begins at this time, and computes unless it waits."""
    messages = list(map(_times, stamps))
    sent = [
        Span("communication", x.name, max(begin, x.sent), x.received, x.nbytes)
        for x in messages
        if x.received > begin
    ]
    return Timeline((*_computed(messages, begin), *sent), tuple(messages))


def _times(x: Stamps) -> MessageTimes:
    travel = x.started, x.sent, x.received
    return MessageTimes(x.name.decode(), x.nbytes, *travel, x.awaited, x.resumed, x.done)


def _computed(messages: Sequence[MessageTimes], begin: float) -> Iterator[Span]:
    """The spans between the waits of a program; a stage ends where a message starts."""
    starts = sorted(x.started for x in messages)
    end = max((x.done for x in messages), default=begin)
    numbers = {"compute": count(), "update": count()}
    for wait in sorted([*((x.awaited, x.resumed) for x in messages), (end, end)]):
        borders = [begin, *(start for start in starts if begin < start < wait[0]), wait[0]]
        for start, end in pairwise(borders):
            kind = "compute" if start <= max(starts, default=begin) else "update"
            name = "stage" if kind == "compute" else kind
            if end > start:
                yield Span(kind, f"{name} {next(numbers[kind])}", start, end)
        begin = max(begin, wait[1])


def _covered(spans: Iterable[Span]) -> float:
    """Seconds that spans cover."""
    seconds: float = 0
    covered = -math.inf  # until this time
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(0, span.end - max(covered, span.start))
        covered = max(covered, span.end)
    return seconds
