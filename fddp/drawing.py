"""A timeline as a picture: what the processor does above, what the link carries below.

Source: the figures of Li et al. (VLDB 2020), section 3.
"""

from collections.abc import Sequence
from typing import Any

from fddp.timeline import Timeline

COMPUTE, TRAFFIC = "#9db8d2", "#1f4e79"


def draw(timeline: Timeline, labels: Sequence[str], title: str, path: Any) -> None:
    """Draws a timeline into a file.

    Args:
      timeline: the spans; the names of communication are numbers.
      labels: what to write upon each, by these numbers.
      title: what stands above it.
      path: file to write; its suffix says the format.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a picture needs matplotlib: pip install 'fddp[audit]'.") from error

    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots()
    bars = [(1e3 * span.start, 1e3 * span.seconds) for span in timeline.compute]
    axes.broken_barh(bars, (1.1, 0.8), color=COMPUTE)
    for k, span in enumerate(timeline.communication):
        axes.broken_barh([(1e3 * span.start, 1e3 * span.seconds)], (0.1, 0.8), color=TRAFFIC, alpha=(0.75, 1.0)[k % 2])
        # Words only where there is room for them.
        if span.seconds > 0.05 * timeline.seconds:
            middle = 1e3 * (span.start + span.end) / 2
            axes.text(middle, 0.5, labels[int(span.name)], ha="center", va="center", color="white", fontsize=8)
    axes.set(yticks=(1.5, 0.5), yticklabels=("computation", "traffic"), xlabel="ms, estimated at peak rates")
    axes.set(xlim=(0, 1e3 * timeline.seconds), ylim=(0, 2))
    axes.set_title(
        f"{title}: {1e3 * timeline.seconds:.2f} ms, {1e3 * timeline.exposed:.2f} ms of traffic exposed", loc="left"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)
