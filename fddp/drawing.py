"""Timelines as a picture: what was computed above what was sent, one row each."""

from collections.abc import Mapping
from typing import Any

from fddp.timeline import Timeline

COLOURS = {"compute": "tab:blue", "communication": "tab:orange"}


def draw(axis: Any, lines: Mapping[str, Timeline]) -> None:
    """Draws timelines under each other, each from 0 ms.

    Args:
      axis: of matplotlib.
      lines: timelines by name.
    """
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
    axis.spines[["top", "right"]].set_visible(False)


def figure(rows: int) -> tuple[Any, Any]:
    """A figure of so many rows, drawn without a screen, and its axes.

    Raises:
      RuntimeError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install 'fddp[train]'.") from error
    sheet = Figure(figsize=(9, 3 * rows), layout="constrained")
    return sheet, sheet.subplots(rows, 1, squeeze=False)[:, 0]
