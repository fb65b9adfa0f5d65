"""Pictures of timelines: computation above communication.

Source: the figures of Li et al. (VLDB 2020), section 3.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fddp.schedules import Timeline

COLOURS = {"compute": "#9db8d2", "update": "#c5b28b", "communication": "#1f4e79"}
CHARACTER = 0.009  # width of a letter in the axes of a figure


def draw(axis: Any, lines: Mapping[str, Timeline], labels: Sequence[str] | None = None) -> None:
    """Draws timelines by name on matplotlib axes, one below another, each from 0 ms.

    Messages show their names where they have room, such as "bucket 3" or "3". With `labels` their
    names are positions in it. A legend explains the colours.
    """
    longest = max((line.seconds for line in lines.values()), default=0)
    for row, line in enumerate(lines.values()):
        begin = min((span.start for span in line.spans), default=0)
        for span in line.spans:
            low = -row - 0.4 * (span.kind == "communication")
            axis.broken_barh(
                [(1e3 * (span.start - begin), 1e3 * span.seconds)],
                (low, 0.36),
                facecolor=COLOURS[span.kind],
                edgecolor="white",
                linewidth=0.5,
                label=span.kind,
            )
            if span.kind == "communication":
                name = labels[int(span.name)] if labels else span.name
                room = span.seconds / (longest * CHARACTER)
                fitting = [x for x in (name, name.removeprefix("bucket ")) if len(x) < room]
                middle = 1e3 * ((span.start + span.end) / 2 - begin)
                style = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
                axis.text(middle, low + 0.18, next(iter(fitting), ""), **style)
    axis.set_yticks([-row for row in range(len(lines))], list(lines))
    axis.set_xlabel("ms")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels())))
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(COLOURS)}
    axis.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, **place)


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
