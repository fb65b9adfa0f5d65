"""Measures and draws docs/traffic.svg: a step with its traffic behind and under the backward pass.

    sudo .venv/bin/python docs/traffic.py

Two hosts joined by 1 Gbit/s (bench/two_hosts.py) train an MLP over MPI, with a bucket for each of
its layers, in the schedules "after" and "overlap". Of each the step of median length is drawn, as
`step.timeline()` returns it on rank 0: bench/results/traffic.json has kind, name, start and end in
ms. The lengths of the steps are written into the pages that show the picture.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import optax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import problem
from bench.record import save, saved
from bench.two_hosts import ask
from fddp.step.schedules import Span, Timeline

PICTURE = ROOT / "docs" / "traffic.svg"
PAGES = (ROOT / "docs" / "index.md", ROOT / "docs" / "how-it-works.md")
STEPS = 21
# Colours in the middle, so that they show on a white page and on a dark one.
COLOURS = {"compute": "#4f86b5", "update": "#8a9099", "communication": "#d07a22"}
WORDS = "#77808a"
WIDTH = 640
BAR = 30


def main() -> None:
    save("traffic", ask("mpi", "1gbit", __file__))
    behind, under = steps()
    PICTURE.write_text(drawing(behind, under))
    for page in PAGES:
        page.write_text(with_lengths(page.read_text(), behind, under))
        print(page)


def measure(path: Path) -> None:
    """The part of one host."""
    group = fddp.init("mpi")
    task = problem("mlp640", seed=group.rank)
    lines = dict[str, Any]()
    for schedule in ("after", "overlap"):
        options: Any = {"schedule": schedule, "bucket_cap_mb": 0}
        step = fddp.train_step(task.loss_fn, optax.sgd(1e-3), has_aux=True, group=group, **options)
        state = step.init(task.params)
        found = list[Timeline]()
        for _ in range(STEPS):
            group.barrier()
            state, _ = step(state, task.batch)
            found.append(step.timeline())
        middle = sorted(found[1:], key=lambda line: line.seconds)[STEPS // 2]
        begin = min(span.start for span in middle.spans)
        lines[schedule] = [
            [x.kind, x.name, 1e3 * (x.start - begin), 1e3 * (x.end - begin)] for x in middle.spans
        ]
    if group.rank == 0:
        path.write_text(json.dumps(lines))


def steps() -> tuple[Timeline, Timeline]:
    """The saved step with its traffic behind the backward pass, and the one with it under it."""
    lines = saved("traffic")
    return _timeline(lines["after"]), _timeline(lines["overlap"])


def _timeline(rows: list[list[Any]]) -> Timeline:
    spans = (Span(kind, name, start / 1e3, end / 1e3) for kind, name, start, end in rows)
    return Timeline(tuple(spans))


def with_lengths(page: str, behind: Timeline, under: Timeline) -> str:
    """A page whose text about the picture has the lengths of the two steps."""
    for line, words in ((behind, "behind"), (under, "under")):
        ms = rf"\d+ ms(?=\s+with\s+(the\s+|its\s+)?traffic\s+{words})"
        page = re.sub(ms, f"{1e3 * line.seconds:.0f} ms", page)
    return page


def drawing(behind: Timeline, under: Timeline) -> str:
    """The picture as SVG, which a page scales down to the width of a phone."""
    scale = (WIDTH - 2) / max(behind.seconds, under.seconds)
    titles = (
        f'"after", traffic behind the backward pass: {1e3 * behind.seconds:.0f} ms',
        f'"overlap", traffic under it: {1e3 * under.seconds:.0f} ms',
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 262" '
        f'width="{WIDTH}" height="262" font-family="sans-serif" font-size="19">',
        *_step(0, titles[0], behind, scale),
        *_step(122, titles[1], under, scale),
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
        if words := _words(span, width):
            middle = f'x="{x + width / 2:.1f}" y="{y + 21}"'
            parts.append(f'<text {middle} fill="white" text-anchor="middle">{words}</text>')
    return parts


def _legend(top: int) -> list[str]:
    parts = list[str]()
    entries = {1: "computed", 140: "buckets travel", 310: "updates"}
    for (x, words), colour in zip(entries.items(), ("compute", "communication", "update")):
        parts += [
            f'<rect x="{x}" y="{top}" width="14" height="14" rx="2" fill="{COLOURS[colour]}"/>',
            f'<text x="{x + 21}" y="{top + 13}" fill="{WORDS}">{words}</text>',
        ]
    return parts


def _words(span: Span, width: float) -> str:
    """What stands upon a span, where there is room."""
    number = span.name.split()[-1]
    if span.kind == "communication":
        return number if width > 14 and number.isdigit() else ""
    if span.kind == "compute" and number == "0":  # the forward pass lies in it
        return "forward, backward" if width > 170 else "forward" if width > 75 else ""
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        main()
