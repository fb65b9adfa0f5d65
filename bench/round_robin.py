"""Several communicators that take the buckets in turn: do they make a step faster? (Paper, figure
12.)

    sudo .venv/bin/python bench/round_robin.py [--problems mlp gpt] [--backends Gloo MPI] [--quick]

`fddp.round_robin([group] * k)` for k = 1, 3, 5 on two hosts joined by 1 Gbit/s
(bench/two_hosts.py), one core each; schedule "staged", buckets of 4 MiB, all k alive at once and in
turn. Under Gloo at most as many all-reduces run side by side as there are processes, so that 3 and
5 groups are both two lanes here.
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
from bench.problems import Problem
from bench.record import ratio, save, summary
from bench.turns import BACKENDS, staged, take_turns

GROUPS = (1, 3, 5)
CAP_MB = 4.0
LANES = {"Gloo": lambda groups: min(groups, 2), "MPI": lambda groups: groups}  # on two processes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "gpt"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing is saved")
    args = parser.parse_args()
    results_of_groups: dict[str, dict[str, dict[str, Any]]] = {}
    sheet = Table("problem", "backend", "groups", "lanes", "ms a step", "quartiles", "of one group")
    for name in args.problems:
        for backend in args.backends:
            seconds = take_turns(__file__, backend, name, rounds=2 if args.quick else args.rounds)
            results_of_groups[f"{name}, {backend}"] = rows = results(seconds, LANES[backend])
            for groups, row in rows.items():
                low = row["quartile_1_ms"]
                high = row["quartile_3_ms"]
                of_one = row["of_one_group"]
                shares = (
                    f"{of_one['median']:.3f} "
                    f"({of_one['quartile_1']:.3f}–{of_one['quartile_3']:.3f})"
                )
                times = (f"{row['median_ms']:.0f}", f"{low:.0f}–{high:.0f}")
                sheet.add_row(name, backend, groups, str(row["lanes"]), *times, shares)
    Console(width=100).print(sheet)
    if not args.quick:
        print(save("round_robin", {"bucket_cap_mb": CAP_MB, "groups": results_of_groups}))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step with so many groups."""
    return {f"{count}": staged(task, fddp.round_robin([group] * count), CAP_MB) for count in GROUPS}


def results(
    seconds: Mapping[str, np.ndarray], lanes: Callable[[int], int]
) -> dict[str, dict[str, Any]]:
    return {
        groups: {"lanes": lanes(int(groups))}
        | summary(durations)
        | {"of_one_group": ratio(durations, seconds["1"])}
        for groups, durations in seconds.items()
    }


if __name__ == "__main__":
    main()
