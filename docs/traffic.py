"""Draws the first page's picture, docs/traffic.svg: one step with its traffic behind and under the
backward pass.

    uv run python docs/traffic.py

Both steps are on paper. The durations of their stages, updates and messages were measured on two
hosts joined by 1 Gbit/s, over Gloo, for an MLP with a bucket for each of its layers, and put one
after the other: bench/results/traffic.json has kind, name, start and end in ms.
"""

import json
from pathlib import Path
from typing import Any

from fddp.program import Span, Timeline

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "traffic.svg"
# Colours in the middle, so that they show on a white page and on a dark one.
COLOURS = {"compute": "#4f86b5", "update": "#8a9099", "communication": "#d07a22"}
WORDS = "#77808a"
WIDTH = 640
BAR = 30


def main() -> None:
    PICTURE.write_text(drawing(*steps()))
    print(PICTURE)


def steps() -> tuple[Timeline, Timeline]:
    """The step with its traffic behind the backward pass, and the one with its traffic under it."""
    spans = json.loads((ROOT / "bench" / "results" / "traffic.json").read_text())
    return _timeline(spans["behind"]), _timeline(spans["under"])


def _timeline(rows: list[list[Any]]) -> Timeline:
    spans = (Span(kind, name, start / 1e3, end / 1e3) for kind, name, start, end in rows)
    return Timeline(tuple(spans))


def drawing(behind: Timeline, under: Timeline) -> str:
    """The picture as SVG, which a page scales down to the width of a phone."""
    scale = (WIDTH - 2) / behind.seconds
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 262" '
        f'width="{WIDTH}" height="262" '
        'font-family="sans-serif" font-size="19">',
        *_step(
            0, f"traffic behind the backward pass: {1e3 * behind.seconds:.0f} ms", behind, scale
        ),
        *_step(122, f"fddp, traffic under it: {1e3 * under.seconds:.0f} ms", under, scale),
        *_legend(244),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _step(top: int, title: str, line: Timeline, scale: float) -> list[str]:
    """A title, a row of what is computed, and below it a row of what is sent."""
    parts = [f'<text x="1" y="{top + 18}" fill="{WORDS}" font-weight="bold">{title}</text>']
    for span in line.spans:
        x, width = 1 + scale * span.start, scale * span.seconds
        y = top + 28 + (BAR + 4) * (span.kind == "communication")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1.5, 0.5):.1f}" height="{BAR}" rx="2" '
            f'fill="{COLOURS[span.kind]}"/>'
        )
        if words := _words(span.name, width, len(line.compute)):
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 21}" fill="white" '
                f'text-anchor="middle">{words}</text>'
            )
    return parts


def _legend(top: int) -> list[str]:
    parts = list[str]()
    entries = {1: "stages, computed", 205: "buckets, all-reduced", 440: "updates"}
    for (x, words), colour in zip(entries.items(), ("compute", "communication", "update")):
        parts += [
            f'<rect x="{x}" y="{top}" width="14" height="14" rx="2" fill="{COLOURS[colour]}"/>',
            f'<text x="{x + 21}" y="{top + 13}" fill="{WORDS}">{words}</text>',
        ]
    return parts


def _words(name: str, width: float, stages: int) -> str:
    """What stands upon a span, where there is room."""
    kind, number = name.split()
    if kind == "stage" and number == "0":  # the forward pass lies in it
        return "forward, backward" if stages == 1 else "forward, 0"
    return number if kind != "update" and width > 14 else ""


if __name__ == "__main__":
    main()
