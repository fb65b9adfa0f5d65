"""Buckets of different sizes: how long does a step take, on a real wire? (Paper, figures 7 and 8.)

    sudo .venv/bin/python bench/buckets.py [--problems mlp gpt] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each; all caps alive
at once and in turn. Cap 0 is a bucket for every gradient. The first and the last bucket hold 1 MiB,
or the cap where that is smaller, but for "one", a single bucket with everything. Of caps that give
the same buckets the smallest stands for all; 25 is always there, as others are compared with it.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.plots import figure
from bench.problems import Problem
from bench.record import ratio, save, save_picture, summary
from bench.turns import BACKENDS, take_turns, training

CAPS_MB = (0, 1, 2, 4, 8, 16, 25, 50)
DEFAULT = 25  # PyTorch's and fddp's
MOST_MB = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "gpt"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing is saved")
    args = parser.parse_args()
    times: dict[str, dict[str, np.ndarray]] = {}
    for name in args.problems:
        for backend in args.backends:
            title = f"{name}, {backend}"
            times[title] = take_turns(
                __file__, backend, name, rounds=2 if args.quick else args.rounds
            )
            Console(width=100).print(table(title, times[title]))
    if not args.quick:
        print(save("buckets", {title: results(seconds) for title, seconds in times.items()}))
        print(picture(times))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step with each cap that gives other buckets than the smaller ones, and with the default."""
    plans: dict[float, fddp.BucketPlan] = {
        cap: fddp.make_plan(task.params, bucket_cap_mb=cap) for cap in CAPS_MB
    }
    first = {plan.digest: cap for cap, plan in reversed(plans.items())}
    chosen = {*first.values(), DEFAULT}
    named = {
        f"{cap:g} MiB, {len(plans[cap].buckets)}": training(task, group, cap)
        for cap in sorted(chosen)
    }
    everything = dict.fromkeys(("first_bucket_mb", "last_bucket_mb"), MOST_MB)
    return named | {"one": training(task, group, MOST_MB, **everything)}


def results(seconds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    (default,) = (
        durations for name, durations in seconds.items() if name.startswith(f"{DEFAULT:g} MiB")
    )
    return {
        name: summary(durations) | {"of_default": ratio(durations, default)}
        for name, durations in seconds.items()
    }


def table(title: str, seconds: Mapping[str, np.ndarray]) -> Table:
    sheet = Table("cap and buckets", "ms a step", "quartiles", f"of {DEFAULT} MiB", title=title)
    for cap, row in results(seconds).items():
        quartiles = f"{row['quartile_1_ms']:.0f}–{row['quartile_3_ms']:.0f}"
        sheet.add_row(
            cap, f"{row['median_ms']:.0f}", quartiles, f"{row['of_default']['median']:.3f}"
        )
    return sheet


def picture(times: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """Draws a box (quartiles) and whiskers (all rounds) for every cap."""
    sheet, axes = figure(len(times))
    for axis, (title, seconds) in zip(axes, times.items()):
        boxes = [1e3 * durations for durations in seconds.values()]
        axis.boxplot(
            boxes, tick_labels=list(seconds), whis=(0, 100), medianprops={"color": "tab:orange"}
        )
        axis.set_title(
            f"{title}: ms a step over the bucket cap, with the number of buckets", loc="left"
        )
        axis.set_ylim(bottom=0)
    return save_picture("buckets", sheet, dpi=80)


if __name__ == "__main__":
    main()
