"""When a step computed and when it communicated: spans, and what they say about overlap.

Source: the columns of Li et al. (VLDB 2020), Fig. 6, and of DDP's logging data.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One stretch of work; times in seconds of a common clock."""

    kind: str
    """"compute" or "communication"."""
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
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((s.end for s in self.spans), default=0) - min((s.start for s in self.spans), default=0)

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing was computed."""
        return _covered(self.communication) - _common(self.communication, self.compute)

    @property
    def overlap_share(self) -> float:
        """Share of the communication that lies under computation, 0 to 1; 0 where nothing was sent."""
        total = _covered(self.communication)
        return 1 - self.exposed / total if total else 0.0

    def bound(self) -> float:
        """The earliest end, in seconds, that these stages and all-reduces allow.

        Each all-reduce starts when its stage is done and the link is free; computation that is no stage of a bucket
        (the update) waits for both.

        Returns:
          Seconds from the start of the first stage.
        """
        sends = self.communication
        stages, rest = self.compute[: len(sends)], self.compute[len(sends) :]
        ready = link = 0.0
        for stage, send in zip(stages, sends):
            ready += stage.seconds
            link = max(link, ready) + send.seconds
        return max(ready, link) + sum(span.seconds for span in rest)

    def __str__(self) -> str:
        begin = min((span.start for span in self.spans), default=0)
        rows = [
            f"{span.kind:<13}  {span.name:<10}  {1e3 * (span.start - begin):8.2f} … {1e3 * (span.end - begin):8.2f} ms"
            for span in sorted(self.spans, key=lambda span: span.start)
        ]
        foot = (
            f"{1e3 * self.seconds:.2f} ms, {1e3 * self.exposed:.2f} ms of communication exposed, "
            f"{self.overlap_share:.0%} of it under computation; bound {1e3 * self.bound():.2f} ms"
        )
        return "\n".join([*rows, foot])


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
