"""The spans of a step and their overlap.

Source: the columns of Li et al. (VLDB 2020), Fig. 6, and of DDP's logging data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        return "\n".join([*rows, foot])

    _repr_html_ = preformatted


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
