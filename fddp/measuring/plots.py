"""Pictures of timelines: computation above communication.

Source: the figures of Li et al. (VLDB 2020), section 3.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fddp.schedules import Timeline

COLOURS = {"compute": "#9db8d2", "update": "#c5b28b", "communication": "#1f4e79"}


def draw(axis: Any, lines: Mapping[str, Timeline]) -> None:
    """Draws timelines by name on matplotlib axes, one below another, each from 0 ms."""
    for row, line in enumerate(lines.values()):
        begin = min((span.start for span in line.spans), default=0)
        for span in line.spans:
            axis.broken_barh(
                [(1e3 * (span.start - begin), 1e3 * span.seconds)],
                (-row - 0.4 * (span.kind == "communication"), 0.36),
                facecolor=COLOURS[span.kind],
                edgecolor="white",
                linewidth=0.5,
            )
    axis.set_yticks([-row for row in range(len(lines))], list(lines))
    axis.set_xlabel("ms")


def label(axis: Any, line: Timeline, labels: Sequence[str]) -> None:
    """Labels the wider all-reduces of a drawing's first timeline; their names index `labels`."""
    for span in line.communication:
        if span.seconds > 0.05 * line.seconds:
            middle = 1e3 * (span.start + span.end) / 2
            axis.text(
                middle,
                -0.22,
                labels[int(span.name)],
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )


def figure(rows: int, height: float = 3.0) -> tuple[Any, Any]:
    """Returns an off-screen figure with one column of axes without top and right borders."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install matplotlib.") from error
    sheet = Figure(figsize=(9, height * rows), layout="constrained")
    axes = sheet.subplots(rows, 1, squeeze=False)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return sheet, axes
