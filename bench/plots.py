"""Off-screen pictures."""

from typing import Any


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
