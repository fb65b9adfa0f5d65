"""Writes the table of step times into README.md and docs/index.md, from bench/results/overlap.json.

    uv run python bench/step_times.py

`bench/overlap.py --torch PYTHON` measures the times.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.record import with_table

RESULTS = ROOT / "bench" / "results" / "overlap.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
MARK = "bench/step_times.py"  # the two comments around the table name this file
PROBLEMS = {
    "mlp640": "MLP, 640 rows, 32 MiB of gradients",
    "gpt": "GPT, 36 MiB",
    "mlp": "MLP, 1,024 rows, 32 MiB",
    "resnet18": "ResNet-18, 45 MiB",
}
OVER_GLOO, JIT = "fddp overlap (Gloo)", "jit, NamedSharding"
# Each column's way, and its title.
COLUMNS = {
    "fddp overlap (MPI)": "fddp over MPI",
    OVER_GLOO: "over Gloo",
    "fddp eager (Gloo)": "eager, over Gloo",
    "DDP": "PyTorch DDP",
    JIT: "`jit`, `NamedSharding`",
}
COMPUTING = ("alone (Gloo)", "PyTorch, alone")
CAPTION = (
    "Milliseconds per step (medians; bold: the fastest), {date}: two hosts emulated on one "
    "machine, one core each, 1 Gbit/s (`bench/overlap.py`; JAX {jax}; PyTorch 2.14 over Gloo, like "
    "`jit`). PyTorch DDP has the best of three caps, fddp a cap near the choice of `fddp.tune`. "
    "Over Gloo fddp takes {share} of the time of `jit`. {note}"
)


def main() -> None:
    text = table(json.loads(RESULTS.read_text()))
    for page in PAGES:
        page.write_text(with_table(page.read_text(), text, MARK))
        print(page)


def table(measured: Mapping[str, Any]) -> str:
    """The table and its caption in Markdown; `measured` is the content of the result file."""
    medians = {name: _medians(result) for name, result in measured["results"].items()}
    lines = [
        f"| | {' | '.join(COLUMNS.values())} | no traffic: JAX, PyTorch |",
        "|---|---|---|---|---|---|---|",
        *(_row(title, medians[name]) for name, title in PROBLEMS.items()),
    ]
    caption = CAPTION.format(
        date=measured["provenance"]["date"],
        jax=measured["provenance"]["versions"]["jax"],
        share=_share_of_jit(medians),
        note=measured["provenance"].get("note", ""),
    )
    return "\n".join([*lines, "", fill(caption.strip(), 120, break_on_hyphens=False)])


def _medians(result: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each way, and of PyTorch DDP with its best cap under 'DDP'."""
    medians = {way: median for way, (_, median, _) in result["step_ms"].items()}
    ddp = min(median for way, median in medians.items() if way.startswith("PyTorch DDP"))
    return {**medians, "DDP": ddp}


def _row(title: str, medians: Mapping[str, float]) -> str:
    ms = [medians[way] for way in COLUMNS]
    cells = [f"**{x:.0f}**" if x == min(ms) else f"{x:.0f}" for x in ms]
    computing = ", ".join(f"{medians[way]:.0f}" for way in COMPUTING)
    return f"| {' | '.join([title, *cells, computing])} |"


def _share_of_jit(medians: Mapping[str, Mapping[str, float]]) -> str:
    shares = [100 * medians[name][OVER_GLOO] / medians[name][JIT] for name in PROBLEMS]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


if __name__ == "__main__":
    main()
