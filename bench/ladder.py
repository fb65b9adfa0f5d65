"""The ideas of DDP: how much does each add to the last, from an all-reduce per leaf to staged
buckets?

    sudo .venv/bin/python bench/ladder.py [--problem mlp] [--backends gloo mpi] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each; all rungs of a backend take turns.
Accumulation takes four times the rows a step, so look at the time of a row. The percentages are
those of `step.measure`, of rank 0. The leaves of "mlp" are 4 MiB each: its small buckets hold two.

Source: Li et al. (VLDB 2020), sections 3.2.1 to 3.2.4.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import Problem, problem
from bench.record import ratio, save, save_picture, summary
from bench.two_hosts import BACKENDS, ask
from bench.watching import Way, watch, way
from fddp.measuring.plots import figure
from fddp.schedules import Pieces, Runner, compiled, in_order, in_stages

MICRO_BATCHES = 4
SMALL_MB = 8.0
DEFAULT_MB = 25.0
FIRST = "after, per leaf"
COLUMNS = {
    "compute_percent": "compute %",
    "non_compute_percent": "non-comp. %",
    "idle_percent": "idle %",
    "overlap_percent": "overlap %",
    "overhead_percent": "overhead %",
    "all_reduces": "all-reduces",
    "all_reduce_ms": "all-reduce ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", default="mlp", help="mlp, resnet18 or gpt")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=2, help=argparse.SUPPRESS
    )  # backend, path: this is one of the hosts
    args = parser.parse_args()
    if args.rank:
        backend, path = args.rank
        return climb(backend, args.problem, path, args.rounds)
    words = ["--problem", args.problem, "--rounds", 3 if args.quick else args.rounds, "--rank"]
    results = {
        backend: ask(backend, args.rate, __file__, *words, backend) for backend in args.backends
    }
    for backend, result in results.items():
        Console(width=150).print(table(f"{args.problem}, {backend}", result))
    if not args.quick:
        print(save("ladder", {"problem": args.problem, **results}))
        print(picture(args.problem, results))
    return None


def climb(backend: str, name: str, path: str, rounds: int) -> None:
    """One host's part."""
    group = fddp.init(backend)
    ways = rungs(problem(name, seed=group.rank), group)
    measured, seconds = watch(ways, group, rounds=rounds)
    rows = {rung: group.size * len(jax.tree.leaves(way.batch)[0]) for rung, way in ways.items()}
    row_seconds = {rung: values / rows[rung] for rung, values in seconds.items()}
    if group.rank == 0:
        report = {
            rung: {
                "rows": rows[rung],
                "step": summary(seconds[rung]),
                "row": summary(row_seconds[rung]),
                "row_to_first": ratio(row_seconds[rung], row_seconds[FIRST]),
                **{column: getattr(measurement, column) for column in COLUMNS},
            }
            for rung, measurement in measured.items()
        }
        Path(path).write_text(json.dumps(report))


def rungs(task: Problem, group: fddp.Group) -> dict[str, Way]:
    """The ways, from the naive one up."""

    def rung(schedule: Any, cap_mb: float, batch: Any = None, **options: Any) -> Way:
        return way(task, group, batch, schedule=schedule, bucket_cap_mb=cap_mb, **options)

    many = jax.tree.map(lambda x: np.concatenate([x] * MICRO_BATCHES), task.batch)
    return {
        FIRST: rung("after", 0),
        f"after, per leaf, {MICRO_BATCHES} parts": rung(
            "after", 0, many, accumulation_steps=MICRO_BATCHES
        ),
        "as ready, per leaf, waited for": rung(blocking, 0),
        "staged, per leaf": rung("staged", 0),
        f"after, {DEFAULT_MB:g} MiB": rung("after", DEFAULT_MB),
        f"staged, {DEFAULT_MB:g} MiB": rung("staged", DEFAULT_MB),
        f"staged, {SMALL_MB:g} MiB": rung("staged", SMALL_MB),
    }


def blocking(group: fddp.Group, pieces: Pieces, donate: bool) -> Runner:
    """A schedule: each all-reduce leaves when its gradients are ready, and the backward pass waits
    for it."""
    return in_order(group, partial(in_stages, group.placement, pieces), donate, compiled)


def table(title: str, result: dict[str, Any]) -> Table:
    sheet = Table("rung", title=title)
    for head in ("rows", "step ms", "ms a row", "× first", *COLUMNS.values()):
        sheet.add_column(head, justify="right")
    for rung, entry in result.items():
        step = entry["step"]
        sheet.add_row(
            rung,
            f"{entry['rows']}",
            *(f"{step['median_ms']:.0f}", f"{step['median_ms'] / entry['rows']:.3f}"),
            f"{entry['row_to_first']['median']:.3f}",
            *(f"{entry[column]:.0f}" for column in COLUMNS),
        )
    return sheet


def picture(name: str, results: dict[str, Any]) -> Path:
    """Draws the time of a row, rung by rung."""
    drawing, axes = figure(len(results))
    for axis, (backend, result) in zip(axes, results.items()):
        steps = [entry["step"] for entry in result.values()]
        scale = np.array([1e3 / entry["rows"] for entry in result.values()])  # ms a step → µs a row
        quartiles = (f"{name}_ms" for name in ("quartile_1", "median", "quartile_3"))
        low, middle, high = (scale * [step[key] for step in steps] for key in quartiles)
        axis.barh(list(result), middle, xerr=[middle - low, high - middle], color="#5b8db8")
        axis.invert_yaxis()
        axis.set_title(f"{name}, {backend}: µs a row, median and quartiles", loc="left")
    return save_picture("ladder", drawing, dpi=100)


if __name__ == "__main__":
    main()
